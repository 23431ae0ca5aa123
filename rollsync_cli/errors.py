"""What the command line says in one line, instead of a traceback."""


class CommandError(Exception):
    """A command cannot do what was asked; the message names the value and the remedy."""

    exit_code = 2


class RunFolderError(CommandError):
    """What is to be reported on is not a run, or a line of it cannot be read."""


class GenerationFailedError(CommandError):
    """The engine gave up with prompts left; what it made has been written."""

    exit_code = 1


class OutputError(CommandError):
    """The output takes no more, as on a full disk; what went before has been written."""

    exit_code = 1
