"""A request, from submit to its one result."""
