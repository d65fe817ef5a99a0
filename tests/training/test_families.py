"""What training asks of a model, in every family: both attentions in one forward, and the head on its own."""

from __future__ import annotations

import pytest
import torch

import linearize
from linearize.modeling.observe import observing
from linearize.training.head import head, hidden_states
from linearize.training.schema import Lora
from linearize.training.trainable import lora_modules, lora_targets
from tests.families import tiny_model
from tests.modeling.test_families import CONVERTED, WINDOW, recipe_for

LENGTH = 11
# The head runs on hidden states of other shapes, whose products sum in another order.
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.mark.parametrize("name", CONVERTED)
def test_teacher_flows_and_the_head_stands_alone(name):
    model = tiny_model(name)
    linearize.linearize_(model, recipe_for(model.config, WINDOW))
    ids = torch.randint(2, 90, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    converted = [layer["module"] for layer in model.config.linearize["layers"] if layer.get("mixer")]
    seen = []

    def observer(given):
        student = given.student()
        assert student.shape == given.teacher.shape
        student.square().sum().backward()
        seen.append(given.module)

    with torch.no_grad(), linearize.bypass(model):
        expected = model(input_ids=ids, use_cache=False).logits
    with torch.no_grad(), observing(model, observer):
        hidden = hidden_states(model, ids, None)
        logits = head(model, hidden)
        parts = torch.cat([head(model, hidden[:, part]) for part in (slice(0, 4), slice(4, LENGTH))], 1)
    torch.testing.assert_close(logits, expected, **TOLERANCE)
    torch.testing.assert_close(parts, expected, **TOLERANCE)
    assert seen == [model.get_submodule(module) for module in converted]
    assert lora_targets(Lora(), *lora_modules(model))
    for parameter_name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (".linearize." in parameter_name), parameter_name
