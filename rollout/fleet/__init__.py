"""The workers of a controller, and the loop on which they are asked, watched and replaced."""
