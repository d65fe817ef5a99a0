"""The sections of a recipe that train and judge: `data`, `train`, `every` and `eval`. Nothing here imports torch.

Every key has a default, unknown ones are errors, and what doesn't go together is found here, too. `linearize.recipe`
reports all of it at once, each problem with its line.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from linearize.errors import did_you_mean

SELF = "self"  # the teacher that is the student's own weights under softmax
# What accelerate 1.0 can write to. Others would be refused by it only when the weights are in memory.
TRACKERS = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb")


def as_tuple(value: Any) -> Any:
    """YAML's lists, which a strict schema wouldn't take for tuples."""
    return tuple(value) if isinstance(value, list) else value


def _number(value: Any) -> Any:
    """YAML 1.1 takes `1e-4` for text; people mean a number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) and name.strip() for name in value):
        raise ValueError(f"must be a list of names, not {value!r}")
    for name in value:
        if list(value).count(name) > 1:
            raise ValueError(f"'{name}' is listed twice")
    return tuple(value)


def _targets(value: Any) -> str | tuple[str, ...]:
    if value == "auto":
        return "auto"
    if isinstance(value, str) or not value:
        raise ValueError(f"must be auto or a list of module names, such as [q_proj, v_proj], not {value!r}")
    return _names(value)


def _trackers(value: Any) -> tuple[str, ...]:
    names = _names(value)
    for name in names:
        if name not in TRACKERS:
            hint = did_you_mean(name, TRACKERS)
            raise ValueError(f"unknown tracker '{name}'; known: {', '.join(TRACKERS)}" + (f"; {hint}" if hint else ""))
    return names


def _betas(value: Any) -> tuple[float, float]:
    numbers = [_number(one) for one in value] if isinstance(value, (list, tuple)) else []
    proper = [one for one in numbers if isinstance(one, (int, float)) and not isinstance(one, bool) and 0 <= one < 1]
    if len(numbers) != 2 or len(proper) != 2:
        raise ValueError(f"must be two numbers from 0 to below 1, such as [0.9, 0.95], not {value!r}")
    return float(proper[0]), float(proper[1])


def _positives(value: Any) -> Any:
    """A list of sizes; a single one may stand alone."""
    if value is None:
        return None
    values = [value] if isinstance(value, int) else value
    if not isinstance(values, (list, tuple)) or not values:
        raise ValueError(f"must be a list of whole numbers, not {value!r}")
    for one in values:
        if isinstance(one, bool) or not isinstance(one, int) or one < 1:
            raise ValueError(f"must be whole numbers of at least 1, not {one!r}")
    return tuple(values)


def _depths(value: Any) -> Any:
    if value is None:
        return None
    values = [_number(one) for one in value] if isinstance(value, (list, tuple)) else [_number(value)]
    for one in values:
        if isinstance(one, bool) or not isinstance(one, (int, float)) or not 0 <= one <= 1:
            raise ValueError(f"must be numbers from 0 to 1, not {one!r}")
    if not values:
        raise ValueError("must be a list of numbers from 0 to 1, not []")
    return tuple(float(one) for one in values)


def _batch_size(value: Any) -> Any:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise ValueError(f"must be auto or a whole number of at least 1, not {value!r}")


Count = Annotated[int, Field(ge=1)]
CountOrNone = Annotated[int, Field(ge=0)]
Share = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1, allow_inf_nan=False)]
Positive = Annotated[float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, BeforeValidator(_number), Field(ge=0, allow_inf_nan=False)]
BelowOne = Annotated[float, BeforeValidator(_number), Field(ge=0, lt=1, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]
Betas = Annotated[tuple[float, float], BeforeValidator(_betas)]
Targets = Annotated[str | tuple[str, ...], BeforeValidator(_targets)]
Trackers = Annotated[tuple[str, ...], BeforeValidator(_trackers)]
Precision = Literal["auto", "bfloat16", "float32"]

_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)


class Data(BaseModel):
    """Where the rows of training come from."""

    model_config = _STRICT

    source: Name = Field(
        default="teacher", description="`teacher`, a file or folder of .txt/.jsonl/.parquet, or a dataset"
    )
    column: Name = Field(default="text", description="the text's key in .jsonl, .parquet and datasets")
    streaming: bool = Field(
        default=True, description="read a dataset of the Hub as it comes, without downloading it first"
    )
    separate: bool = Field(default=True, description="documents in a row don't see each other")
    recall_share: Share = Field(default=0.0, description="share of the rows that hold synthetic recall documents")
    held_out: CountOrNone = Field(default=16, description="rows that are judged on and never trained on")
    shuffle: bool = Field(default=True, description="documents in an order drawn from the seed")
    teacher_tokens: Count = Field(default=200_000, description="tokens to sample from the teacher")
    seed: CountOrNone = Field(default=0, description="seed of the order, of the recall documents and of the samples")


class Calibrate(BaseModel):
    """Stage 0: mixers set by formula from a few rows. No gradient."""

    model_config = _STRICT

    stage: Literal["calibrate"]
    rows: Count = 4
    length: Count = 256


class Steps(BaseModel):
    """What every stage has that takes optimiser steps."""

    model_config = _STRICT

    stage: Any  # narrowed by each stage; stands here to come first where a recipe is shown
    tokens: Count = Field(default=60_000, description="tokens to train on, over all processes")
    length: Count = Field(default=1024, description="tokens of a row")
    batch: Count = Field(default=8, description="rows of an optimiser step, over all processes")
    micro_batch: Count = Field(default=1, description="rows of a forward in one process")
    lr: Positive = Field(default=1e-4, description="learning rate at its highest")
    schedule: Literal["cosine", "wsd", "constant"] = Field(default="cosine", description="how the rate goes down")
    warmup: Share = Field(default=0.05, description="share of the steps in which the rate goes up")
    decay: Share = Field(
        default=0.2,
        description="share of the steps in which the rate goes down; schedule wsd alone",
        validate_default=True,
    )
    min_lr: Share = Field(default=0.1, description="share of the rate that is left at the end")
    weight_decay: NotNegative = Field(default=0.0, description="AdamW's weight decay")
    betas: Betas = Field(default=(0.9, 0.95), description="AdamW's decay rates of the moments")
    clip: Positive | None = Field(default=1.0, description="largest norm of the gradient; null: none")
    redraw: CountOrNone = Field(default=0, description="steps after which random features are drawn anew; 0: never")

    @field_validator("micro_batch")
    @classmethod
    def _divides_the_batch(cls, value: int, info: ValidationInfo) -> int:
        batch = info.data.get("batch")
        if batch is not None and batch % value:
            raise ValueError(f"must divide batch, {batch}, and {value} doesn't")
        return value

    @field_validator("decay")
    @classmethod
    def _leaves_room_for_the_warmup(cls, value: float, info: ValidationInfo) -> float:
        warmup = info.data.get("warmup", 0.0)
        if info.data.get("schedule") == "wsd" and warmup + value > 1:
            raise ValueError(f"is {value:g}, which with warmup {warmup:g} is more than all steps")
        return value


class Transfer(Steps):
    """Stage 1: mixers learn what the softmax attention of their own layer puts out (arXiv:2410.10254)."""

    stage: Literal["transfer"]
    loss: Literal["mse", "normalized_l2", "cosine"] = "mse"
    lr: Positive = 1e-2
    block: Count | None = Field(default=None, description="layers trained at once from stored hidden states; null: all")


class Lora(BaseModel):
    """Low-rank changes of the frozen weights (arXiv:2106.09685)."""

    model_config = _STRICT

    r: Count = 16
    alpha: Positive = 32.0
    dropout: BelowOne = 0.0
    targets: Targets = Field(default="auto", description="auto: q, k, v, o of the converted layers; or module names")
    merge: bool = Field(default=True, description="added to the weights at the end; false: kept as an adapter")


class _Tuned(Steps):
    """What the stages have that train on the model's own output."""

    trains: Literal["lora", "mixers", "all"] = "lora"
    lora: Lora = Lora()
    mixer_lr: Positive | None = Field(default=None, description="learning rate of the mixers; null: lr")
    gradient_checkpointing: bool = False

    @field_validator("lora")
    @classmethod
    def _is_trained(cls, value: Lora, info: ValidationInfo) -> Lora:
        trains = info.data.get("trains", "lora")
        if trains != "lora" and value != Lora():
            raise ValueError(f"isn't there where the stage trains {trains}; write trains: lora, or leave lora out")
        return value

    @field_validator("mixer_lr")
    @classmethod
    def _differs(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("trains") == "mixers":
            raise ValueError("is for stages that train more than mixers; write lr instead")
        return value


class Distill(_Tuned):
    """Stage 2: the student's next-token distributions learn the teacher's (KL)."""

    stage: Literal["distill"]
    temperature: Positive = 1.0
    ce: Share = Field(default=0.0, description="share of cross-entropy with the text itself in the loss")
    teacher: Name = Field(
        default=SELF, description="self: the same weights under softmax; or a model", validate_default=True
    )

    @field_validator("teacher")
    @classmethod
    def _stays_as_it_is(cls, value: str, info: ValidationInfo) -> str:
        if value == SELF and info.data.get("trains") == "all":
            raise ValueError("can't be self where the stage trains all, the teacher's weights among them; name a model")
        return value


class Finetune(_Tuned):
    """Stage 3: cross-entropy with the text."""

    stage: Literal["finetune"]


STAGES: dict[str, type[BaseModel]] = {
    "calibrate": Calibrate,
    "transfer": Transfer,
    "distill": Distill,
    "finetune": Finetune,
}
Stage = Annotated[Calibrate | Transfer | Distill | Finetune, Field(discriminator="stage")]


class Every(BaseModel):
    """How often things happen, in optimiser steps."""

    model_config = _STRICT

    log: Count = Field(default=1, description="a line of metrics")
    evaluate: CountOrNone = Field(default=50, description="held-out perplexity and a small recall task; 0: never")
    save: Count = Field(default=50, description="a training checkpoint")


class Evaluation(BaseModel):
    """What `linearize run` asks of `linearize.evaluate`; keys and defaults are that function's."""

    model_config = _STRICT

    teacher: Name | None = None
    suite: Name = "quick"
    tasks: Annotated[tuple[str, ...], BeforeValidator(_names)] = ()
    lengths: Annotated[tuple[int, ...] | None, BeforeValidator(_positives)] = None
    depths: Annotated[tuple[float, ...] | None, BeforeValidator(_depths)] = None
    pairs: Annotated[tuple[int, ...] | None, BeforeValidator(_positives)] = None
    samples: Count | None = None
    text: Name | None = None
    haystack: Name | None = None
    generate: bool | None = None
    ablate: bool = True
    limit: Count | None = None
    seed: CountOrNone = 0
    batch_size: Annotated[int | str, BeforeValidator(_batch_size)] = "auto"
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
