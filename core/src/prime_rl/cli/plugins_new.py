"""`prime plugins new KIND NAME`: writes the repository of a new plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prime_rl.plugins import scan
from prime_rl.plugins.records import normalise_name
from prime_rl.testing.scaffold import scaffolded_kinds, write_plugin

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
def new(
    kind: Annotated[str, typer.Argument(help=f"One of: {', '.join(scaffolded_kinds())}.")],
    name: Annotated[str, typer.Argument(help="Name that a configuration will use.")],
    directory: Annotated[
        Path, typer.Option("--dir", help="Folder in which the repository is created.")
    ] = Path("."),
) -> None:
    """Write the repository of a new plugin: it builds, installs, and passes its own tests."""
    folder = write_plugin(normalise_name(kind), name, directory)
    plain = normalise_name(name)
    typer.echo(f"wrote {folder}")
    for record in scan().of_kind(normalise_name(kind)):
        if record.name == plain:
            typer.echo(
                f"note: {record.describe()} has the same name; users must write both in full"
            )
    typer.echo(
        f"next:\n  pip install -e '{folder}[test]'\n  prime plugins list --kind {kind}\n"
        f"  prime plugins test {plain} --kind {kind}"
    )
