"""How fast attention transfer is, beside a plain forward of the same model: SmolLM2-135M-Instruct in bf16, by turns.

python benchmarks/transfer_speed.py [--threads 1] [--length 1024] [--compile]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import linearize
from demo import find_model

TURNS = 4


def main() -> None:
    import torch

    from linearize.training.objectives import Transfer

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--length", type=int, default=1024, help="tokens of the one row")
    parser.add_argument(
        "--compile", action="store_true", help="mixers under torch.compile, which training doesn't offer"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = linearize.linearize_(linearize.load(find_model(), dtype=torch.bfloat16), "hedgehog-window").eval()
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".linearize." in name)
    if arguments.compile:
        for layer in model.config.linearize["layers"]:
            model.get_submodule(layer["module"]).linearize.compile(dynamic=False)
    ids = torch.randint(model.config.vocab_size, (1, arguments.length), generator=torch.Generator().manual_seed(0))
    transfer = Transfer(model, "mse")

    def forward() -> None:
        with torch.no_grad(), linearize.bypass(model):
            model(input_ids=ids, use_cache=False)

    def speed(run: Callable[[], Any]) -> float:
        begun = time.perf_counter()
        run()
        return arguments.length / (time.perf_counter() - begun)

    begun = time.perf_counter()
    transfer(ids, None, 1.0)
    forward()
    print(f"first time: {time.perf_counter() - begun:.1f} s")
    turns = [(speed(lambda: transfer(ids, None, 1.0)), speed(forward)) for _ in range(TURNS)]
    best = [max(column) for column in zip(*turns, strict=True)]
    print(f"tokens/s: transfer {best[0]:.0f}, forward with head {best[1]:.0f}, ratio {best[0] / best[1]:.2f}")


if __name__ == "__main__":
    main()
