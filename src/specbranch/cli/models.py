"""`specbranch models`: the models known by name, and fetching them."""

from __future__ import annotations

import json

import click


@click.group()
def models() -> None:
    """List the models known by name, and fetch them into the cache folder."""


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON list.")
def list_models(as_json: bool) -> None:
    """Show each known model, its size and whether it is here."""
    from specbranch.models import store

    rows = [
        {
            "name": name,
            "megabytes": round(model.size / 1e6),
            "licence": model.licence,
            "path": str(path) if (path := store.installed(name)) else None,
        }
        for name, model in store.KNOWN.items()
    ]
    if as_json:
        click.echo(json.dumps(rows))
        return
    for row in rows:
        click.echo(f"{row['name']:16} {row['megabytes']:5} MB  {row['licence']:12} {row['path'] or 'not fetched'}")


@models.command()
@click.argument("name", default="smollm2-135m")
def pull(name: str) -> None:
    """Fetch model NAME once [smollm2-135m]; afterwards it is used offline. An interrupted fetch goes on where it stopped."""
    from specbranch.cli.progress import pulled
    from specbranch.models import store

    if name not in store.KNOWN:
        from specbranch.errors import unknown

        raise unknown("model", name, store.KNOWN)
    click.echo(pulled(name))
