from pathlib import Path

import pytest
from plan_examples import Planner


@pytest.fixture
def planner(tmp_path: Path) -> Planner:
    return Planner(tmp_path)
