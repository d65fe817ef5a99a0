"""`linearize bench`: grammar only."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from linearize.errors import UsageError
from linearize.grammar import common_options, emit, import_option, import_plugins, note, quiet_stdout


@click.command()
@click.argument("models", nargs=-1, required=True)
@click.option("--lengths", default="1024,8192", metavar="N,...", help="Tokens of context (default: 1024,8192).")
@click.option("--new-tokens", type=int, default=32, metavar="N", help="Tokens decoded at each length (32).")
@click.option("--rounds", type=int, default=3, metavar="N", help="Measurements of each, in turns (3).")
@click.option("--batch", type=int, default=1, metavar="N", help="Sequences at once (1).")
@click.option("--alone", is_flag=True, help="Not beside the same weights under softmax.")
@click.option("--dtype", metavar="DTYPE", help="bfloat16, float16 or float32 (default: the faster on a CPU).")
@click.option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N (default: a GPU if there is one).")
@click.option("-o", "--out", metavar="OUT", help="Folder for bench.json and bench.png.")
@import_option
@common_options
def bench(models: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Time prefill and decoding of MODELS, and measure their caches, at several lengths of context.

    A converted model is measured beside itself under softmax attention.
    """
    import_plugins(options.pop("plugins"))
    out = options.pop("out")
    try:
        lengths = [int(text) for text in options.pop("lengths").split(",")]
    except ValueError as error:
        raise UsageError("--lengths takes whole numbers", "For example --lengths 1024,8192") from error
    if out and find_spec("matplotlib") is None:
        raise UsageError("the figure needs matplotlib", "pip install 'linearize[eval]', or leave -o out")
    if out:
        from linearize_evals.settings import check_folder

        check_folder(Path(out))
    from linearize.bench import bench as measure
    from linearize.bench_show import print_bench, write
    from linearize.console import progress

    with quiet_stdout(as_json), progress("tokens") as bar:
        document = measure(models, lengths=lengths, progress=bar, note=note, **options)
    if out:
        document["wrote"] = write(document, Path(out))
    emit(document, as_json, print_bench)
