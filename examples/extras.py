"""What an example needs beyond rollsync itself."""

import argparse
import importlib.util


def need_extra(parser: argparse.ArgumentParser, extra: str, package: str) -> None:
    """Ends the program with one line and exit code 2 where `package`, which comes with the extra, is not installed."""
    if importlib.util.find_spec(package) is None:
        remedy = f"pip install -e '.[{extra}]' in the repository's folder"
        parser.exit(2, f"{parser.prog}: error: the package {package} is not installed: {remedy}\n")
