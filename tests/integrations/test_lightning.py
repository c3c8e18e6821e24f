from __future__ import annotations
from pathlib import Path
import pytest
from framework_runs import Framework, framework, killed_and_resumed

@pytest.mark.parametrize("m,ranks",[("lightning_loop",1),("hf_trainer",1),("accelerate_loop",2)])
def test_x(tmp_path: Path, m: str, ranks: int) -> None:
    with framework("integrations."+m, tmp_path) as example:
        killed_and_resumed(example, ranks)
