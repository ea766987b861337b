"""A case that fails, hangs or ends its process is named, with what each rank says; the cases after it are run all the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from case_table import FOLDER

BROKEN = """
import sys
from pathlib import Path
import case_table, ranks
case_table.MODULES, ranks.DEADLINE = ("broken",), 4.0
ranks.main(Path(sys.argv[1]), [case.name for case in case_table.declared()])
"""


@pytest.mark.slow
def test_cases_that_go_wrong_are_named_and_the_others_are_run(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BROKEN, str(tmp_path)]
    output = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=100, check=True).stdout
    lines = {(line["case"], line["backend"]): line for line in map(json.loads, output.splitlines())}

    def told(case: str, backend: str) -> list[str]:
        return [answer.get("error", "fine").strip().splitlines()[-1] for answer in lines[case, backend]["answers"]]

    for backend in ("gloo", "phoenix"):
        late, failed, ended = (
            told(case, backend) for case in ("one_rank_is_late_for_ever", "one_rank_fails", "one_process_ends")
        )
        assert late[2] == "hung: no answer within 4 s"
        stacks: dict[str, Any] = lines["one_rank_is_late_for_ever", backend]["stderr"]
        assert "in one_rank_is_late_for_ever" in stacks["rank2"]
        assert failed[1] == "LookupError: rank 1 has lost it"
        assert ended == ["fine", "fine", "fine", "the process ended"]
        assert told("all_is_well", backend) == ["fine"] * 4
    assert lines["all_is_well", "gloo"]["answers"] == lines["all_is_well", "phoenix"]["answers"]
    differing = [
        rank
        for rank in range(4)
        if lines["backends_differ", "gloo"]["answers"][rank] != lines["backends_differ", "phoenix"]["answers"][rank]
    ]
    assert differing == [2]
