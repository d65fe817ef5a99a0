from __future__ import annotations

import pytest

from tests.modeling.models import RECIPES, converted


@pytest.fixture(params=RECIPES)
def any_model(request):
    return converted(request.param)
