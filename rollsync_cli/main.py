"""`rollsync doctor`, `rollsync generate`, `rollsync report`.

Typer, because transformers' own command line is made with it, so it is there already, and --help comes from the signatures.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from rollsync_cli.errors import CommandError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
INTERRUPTED = 130


def _print_version(wanted: bool) -> None:
    if wanted:
        from rollsync_cli.versions import own_version

        typer.echo(f"rollsync {own_version()}")
        raise typer.Exit


@app.callback()
def rollsync(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Rollouts from a model whose weights change while it generates."""


@app.command(short_help="Check this machine before a run.")
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for an issue or a script.")] = False,
    ray: Annotated[
        bool, typer.Option("--ray", help="Also start a local Ray and run a task on it (about 10 s).")
    ] = False,
) -> None:
    """Check this machine: versions, devices, memory, features, Ray, and a tiny engine that generates and is updated.

    Each line is ok, off (works without it; says why) or FAIL (with the remedy).

    Exit code: 0, or 1 if something fails.
    """
    from rollsync_cli.checks import print_checks
    from rollsync_cli.doctor import examine

    with _one_line_errors():
        ok = print_checks(examine(start_ray=ray), as_json=as_json)
    raise typer.Exit(0 if ok else 1)


@app.command(short_help="Rollouts of a file of prompts.")
def generate(
    prompts: Annotated[
        Path,
        typer.Argument(
            help="Prompts: a .jsonl file whose lines are a string, token ids, chat messages, or an object with one of these "
            'as "prompt" (other columns are kept as metadata); any other file: a prompt a line. "-": text from stdin.'
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            help="A transformers folder or a hub name of a causal language model; smollm2: the examples' model, once one of them has run."
        ),
    ],
    out: Annotated[Path, typer.Option(help='The file of rollouts, a JSON object a line. "-": stdout.')] = Path("-"),
    force: Annotated[bool, typer.Option("--force", help="Replace --out if it exists.")] = False,
    num_samples: Annotated[int, typer.Option("--num-samples", "-n", min=1, help="Rollouts of each prompt.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Upper bound on the tokens of a rollout.")] = 256,
    temperature: Annotated[float, typer.Option(help="Divides the logits; 0 is greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the most likely tokens of this probability; 1 is off.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends a rollout; may be given again.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same rollouts.")] = None,
    timeout_s: Annotated[
        float | None,
        typer.Option("--timeout", help="Seconds for a rollout, waiting included; it ends with what it has."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="A prompt of text is a user's message: apply the model's chat template.")
    ] = False,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights; auto: as the model was saved.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; the GPU if there is one.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; torch's own choice by default.")] = None,
    progress: Annotated[bool, typer.Option(help="A progress bar, on stderr.")] = True,
) -> None:
    """Generate rollouts of prompts, in their order, with token ids, log-probs and text.

    A prompt that cannot work gets its line too, with the reason as "error"; the others go on.

    \b
        rollsync generate prompts.jsonl --model path/to/model --out rollouts.jsonl
        rollsync generate - --model smollm2 -n 4 --temperature 0.7 < questions.txt

    Exit code: 0; 1 if a prompt was refused, a rollout failed or the output took no more; 2 if nothing could be started; 130
    after Ctrl-C, which leaves whole lines.
    """
    from rollsync_cli.generate import Job, run

    with _one_line_errors():
        job = Job(
            prompts=prompts,
            model=model,
            out=out,
            force=force,
            num_samples=num_samples,
            sampling={
                "max_new_tokens": max_new_tokens,
                "temperature": temperature,
                "top_k": top_k,
                "top_p": top_p,
                "stop": tuple(stop or ()),
                "seed": seed,
            },
            timeout_s=timeout_s,
            chat=chat,
            dtype=dtype,
            device=device,
            threads=threads,
            progress=progress,
        )
        num_failed = run(job)
    if num_failed:
        typer.echo(f'rollouts with an error: {num_failed}; see "error" in their lines', err=True)
    raise typer.Exit(1 if num_failed else 0)


@app.command(short_help="One HTML page of a run.")
def report(
    run: Annotated[
        Path,
        typer.Argument(
            help="The folder of a run (rollouts.jsonl, and updates.jsonl and metrics.jsonl if it has them)."
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="The page; by default report.html in that folder.")] = None,
) -> None:
    """Make one HTML page of a run: reward, length, staleness, pauses, and a timeline of requests and updates.

    The page needs nothing else: no network, no script. A run's folder is written by rollout.RunLog, by a controller with
    RolloutConfig(rollouts_jsonl=...), and by examples/grpo.py.

    Exit code: 0, with the page's path on stdout; 2 if there is no such run or the page cannot be written.
    """
    from rollsync_cli.report import write_report

    with _one_line_errors():
        try:
            page = write_report(run, out)
        except OSError as error:
            where = "report.html in that folder" if out is None else out
            raise CommandError(f"the page {where} cannot be written: {error.strerror}; give another --out") from None
        typer.echo(page)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """What the user can mend is said in one line, with the error's exit code; Ctrl-C has its own."""
    try:
        yield
    except CommandError as error:
        _complain(str(error))
        raise typer.Exit(error.exit_code) from None
    except BrokenPipeError:
        raise  # typer ends without a word: who reads the output has had enough, as `head` has
    except OSError as error:
        _complain(f"{error}; is it there, and yours to read or write?")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _complain(message: str) -> None:
    typer.echo(f"rollsync: error: {' '.join(message.split())}", err=True)


def main() -> None:
    """The console script."""
    app(prog_name="rollsync")


if __name__ == "__main__":
    main()
