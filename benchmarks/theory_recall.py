"""Recall against the size of the state: small softmax teachers on MQAR, converted to every mixer at several sizes.

    python benchmarks/theory_recall.py [--only NAME ...] [--pairs 32] [--seeds 0] [--json FILE]

The task is `linearize_evals.mqar_tokens` at its densest (arXiv:2312.04927): N pairs of a key and a value, then every
key again, in random order, each followed by its value; chance is 1 / 127. Teachers are Llamas of 2 layers and 2 heads,
trained from scratch with a curriculum of N. A student is the teacher's conversion, trained on as many tokens as every
other: attention transfer, then the answers' cross-entropy, all weights. Mixers whose state has no size of its own are
converted from teachers with a head dim of 16, 32 and 64, the others from the one with 32.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import linearize
from linearize.mixers import FEATURE_MAPS, MIXERS, state_bytes
from linearize.mixers.registry import AttentionShape
from linearize.training.calibrate import calibrate
from linearize.training.objectives import Transfer
from theory_tools import LOOKS, figure, logarithmic, versions

VOCABULARY = 256
KEYS, VALUES = (1, VOCABULARY // 2), (VOCABULARY // 2, VOCABULARY)
HEADS, HIDDEN, DIM = 2, 64, 32
TOKENS_A_STEP = 4096
TRANSFER_STEPS, ANSWER_STEPS = 30, 200
LR = 3e-3
GOOD_TEACHER = 0.99
SETTINGS = {"tokens": TOKENS_A_STEP, "transfer": TRANSFER_STEPS, "answers": ANSWER_STEPS, "lr": LR}


@dataclass(frozen=True)
class Student:
    """A mixer at one size: its recipe, and the head dim of the teacher that it is made from."""

    recipe: dict[str, Any]
    dim: int = DIM


def sized(option: str, values: tuple[int, ...], **recipe: Any) -> list[Student]:
    """One option of the feature map or the mixer sets the size."""
    if option in ("features", "project_dim"):
        return [Student(recipe | {"feature_map_options": {option: value}}) for value in values]
    return [Student(recipe | {option: value}) for value in values]


def by_dim(**recipe: Any) -> list[Student]:
    return [Student(recipe, dim) for dim in (16, 32, 64)]


STUDENTS: dict[str, list[Student]] = {
    "linear, elu1": by_dim(mixer="linear", feature_map="elu1"),
    "linear, favor": sized("features", (16, 64, 256), mixer="linear", feature_map="favor"),
    "window, hedgehog": sized("window", (8, 32, 64), mixer="window", feature_map="hedgehog", sinks=0),
    "deltanet": by_dim(mixer="deltanet"),
    "mamba2": by_dim(mixer="mamba2"),
    "gla": by_dim(mixer="gla"),
    "linear, taylor": sized("project_dim", (4, 8, 16), mixer="linear", feature_map="taylor"),
    "gated_deltanet": by_dim(mixer="gated_deltanet"),
    "linear, cosformer": by_dim(mixer="linear", feature_map="cosformer"),
    "retnet": by_dim(mixer="retnet"),
    "rfa": [Student({"mixer": "rfa", "mixer_options": {"features": n}}) for n in (16, 64, 256)],
    "kda": by_dim(mixer="kda"),
}
MAPS = ("linear", "rfa")  # what the left panel of the figure shows; the window stands in both


def documents(pairs: int, count: int, generator: torch.Generator) -> Tensor:
    """(count, 4 pairs) token ids; the answers are at 2 pairs + 1, 2 pairs + 3, …"""
    keys, values = (
        torch.rand(count, high - low, generator=generator).argsort(1)[:, :pairs] + low for low, high in (KEYS, VALUES)
    )
    order = torch.rand(count, pairs, generator=generator).argsort(1)
    listed = torch.stack([keys, values], -1)
    asked = listed.gather(1, order[..., None].expand_as(listed))
    return torch.cat([listed, asked], 1).flatten(1)


def answers(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(n, V) logits at the queries, and (n,) the values."""
    pairs = ids.shape[1] // 4
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[:, 2 * pairs :: 2]
    return model.lm_head(hidden).flatten(0, 1), ids[:, 2 * pairs + 1 :: 2].flatten()


def descend(model: Any, pairs: list[int], lr: float, generator: torch.Generator, stop: float = 0.0) -> None:
    """Cross-entropy of the answers, every weight, a step for each entry of `pairs`. The rate falls to 0 over the second
    half. Ends early at a loss of `stop`."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.0)
    for step, count in enumerate(pairs):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 20, (1 - step / len(pairs)) * 2)
        loss = F.cross_entropy(*answers(model, documents(count, TOKENS_A_STEP // (4 * count), generator)))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        if loss.item() < stop:
            return


@torch.no_grad()
def accuracy(model: Any, pairs: int) -> float:
    """Of 4096 answers, on documents that no training sees."""
    generator = torch.Generator().manual_seed(10**6)
    logits, values = answers(model.eval(), documents(pairs, 4096 // pairs, generator))
    return (logits.argmax(-1) == values).float().mean().item()


def teacher(dim: int, pairs: int, seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=dim,
        vocab_size=VOCABULARY,
        max_position_embeddings=4 * pairs,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    few = 2
    while few <= pairs:  # without the curriculum it stays at a guess among the values of the document
        descend(model, [few] * 400, 3e-3, generator, stop=0.02)
        few *= 2
    for _ in range(3):
        if accuracy(model, pairs) < GOOD_TEACHER:
            descend(model.train(), [pairs] * 400, 3e-3, generator, stop=0.01)
    return model


def train(model: Any, pairs: int, seed: int) -> None:
    """The same tokens for every student. The teacher may go on, too, under softmax: what the tokens alone do."""
    generator = torch.Generator().manual_seed(seed + 1)
    rows = TOKENS_A_STEP // (4 * pairs)
    mixers = [p for name, p in model.named_parameters() if ".linearize." in name]
    calibrate(model.eval(), [(documents(pairs, 32, generator), None)])
    transfer = Transfer(model, "mse")
    optimizer = torch.optim.AdamW(mixers, lr=1e-2, weight_decay=0.0) if mixers else None
    for _ in range(TRANSFER_STEPS):
        ids = documents(pairs, rows, generator)
        if optimizer:
            optimizer.zero_grad()
            transfer(ids, None, 1.0)
            optimizer.step()
    easier = [pairs // 4] * (ANSWER_STEPS // 5) + [pairs // 2] * (ANSWER_STEPS // 5)
    descend(model.train(), easier + [pairs] * (ANSWER_STEPS - len(easier)), LR, generator)


def converted(base: Any, student: Student) -> Any:
    return linearize.linearize_(copy.deepcopy(base), student.recipe)


def size_of(model: Any) -> int:
    """Bytes of the state of a layer, in float32."""
    layer = next(layer for layer in model.config.linearize["layers"] if layer.get("mixer"))
    return state_bytes(layer["mixer"], AttentionShape(**layer["shape"]), dtype=torch.float32)


def registered(student: Student) -> bool:
    return student.recipe["mixer"] in MIXERS and student.recipe.get("feature_map", "elu1") in FEATURE_MAPS


def run(name: str, base: Any, student: Student, pairs: int, seed: int) -> dict[str, Any]:
    begun = time.process_time()
    torch.manual_seed(seed)
    model = converted(base, student)
    found: dict[str, Any] = {"name": name, "dim": student.dim, "bytes": size_of(model), "seed": seed, "pairs": pairs}
    found |= SETTINGS
    found["untrained"] = accuracy(model, pairs)
    train(model, pairs, seed)
    found["accuracy"] = accuracy(model, pairs)
    return found | {"cpu_seconds": round(time.process_time() - begun, 1)}


def draw(rows: list[dict[str, Any]], cache: dict[int, int], pairs: int) -> None:
    """Accuracy against bytes; the bars are the range over seeds."""
    names = list(dict.fromkeys(row["name"] for row in rows))
    panels = [[n for n in names if n.startswith(MAPS)], [n for n in names if not n.startswith((*MAPS, "window"))]]
    with figure("recall-state", 2) as (_, axes):
        for number, (one, shown) in enumerate(zip(axes, panels, strict=True)):
            for place, name in enumerate(["window, hedgehog", *shown]):
                points: dict[int, list[float]] = {}
                for row in rows:
                    if row["name"] == name:
                        points.setdefault(row["bytes"], []).append(row["accuracy"])
                # The panels have lines of their own, apart from the first.
                look = LOOKS[place and (place + 3 * number) % len(LOOKS)]
                middle = [sum(points[size]) / len(points[size]) for size in sorted(points)]
                one.plot(sorted(points), middle, label=name, markersize=4, linewidth=1.3, **look)
                for size, values in points.items():
                    one.plot([size, size], [min(values), max(values)], color=look["color"], linewidth=0.8)
            one.axvline(cache[DIM], color="#767676", linewidth=0.8, linestyle=":", label="the teacher's cache")
            one.set(xlabel="state of a layer (KiB)", ylim=(-0.03, 1.05))
            logarithmic(one, y=False)
            ticks = [2**power for power in range(10, 18)]
            one.set_xticks(ticks, [f"{tick // 1024}" for tick in ticks])
        axes[0].set(title=f"feature maps: recall of {pairs} pairs", ylabel="accuracy")
        axes[1].set(title="decays and delta rules")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"of {', '.join(map(repr, STUDENTS))}")
    parser.add_argument("--pairs", type=int, default=32)
    parser.add_argument("--seeds", default="0", help="of teacher and student, comma-separated")
    parser.add_argument("--out", type=Path, default=Path("theory-recall"), help="teachers and results; goes on there")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    print(versions())
    wanted = {name: STUDENTS[name] for name in arguments.only or STUDENTS}
    place = arguments.out / f"pairs-{arguments.pairs}.json"
    rows: list[dict[str, Any]] = json.loads(place.read_text()) if place.exists() else []
    bases: dict[tuple[int, int], Any] = {}
    print(f"{'':20}{'dim':>4}{'bytes':>8}{'untrained':>11}{'accuracy':>10}{'CPU s':>7}", flush=True)
    for seed in (int(seed) for seed in arguments.seeds.split(",")):
        for name, student in ((name, student) for name, those in wanted.items() for student in those):
            if not registered(student):
                continue
            if (student.dim, seed) not in bases:
                bases[student.dim, seed] = find_teacher(arguments.out, student.dim, arguments.pairs, seed)
            base = bases[student.dim, seed]
            key = {"name": name, "bytes": size_of(converted(base, student)), "seed": seed} | SETTINGS
            found = next((row for row in rows if key.items() <= row.items()), None)
            if found is None:
                found = run(name, base, student, arguments.pairs, seed)
                rows.append(found)
                place.write_text(json.dumps(rows, indent=1) + "\n")
            figures = f"{found['untrained']:11.3f}{found['accuracy']:10.3f}{found['cpu_seconds']:7.0f}"
            print(f"{name:20}{student.dim:4}{found['bytes']:8}{figures}", flush=True)
    cache = {dim: 2 * HEADS * dim * 4 * arguments.pairs * 4 for dim in (16, 32, 64)}
    print(f"the teachers' caches at {4 * arguments.pairs} tokens, bytes of a layer by head dim: {cache}")
    draw([row for row in rows if row["name"] in wanted and row.items() >= SETTINGS.items()], cache, arguments.pairs)


def find_teacher(out: Path, dim: int, pairs: int, seed: int) -> Any:
    """That of an earlier run, or a new one."""
    from transformers import AutoModelForCausalLM

    folder = out / f"teacher-{dim}-{pairs}-{seed}"
    begun = time.process_time()
    if not folder.exists():
        teacher(dim, pairs, seed).save_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder)
    found = accuracy(base, pairs)
    print(f"{'teacher':20}{dim:4}{'':8}{'':11}{found:10.4f}{time.process_time() - begun:7.0f}", flush=True)
    if found < GOOD_TEACHER:
        raise SystemExit(f"{folder} recalls {found:.1%}, less than {GOOD_TEACHER:.0%}: choose another seed")
    return base


if __name__ == "__main__":
    main()
