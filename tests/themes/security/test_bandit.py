"""bandit over megarl: nothing of medium or high severity but what is listed here, each with the reason why it is no hole."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from bandit.core.config import BanditConfig
from bandit.core.manager import BanditManager

ROOT = Path(__file__).parents[3]
SHELTERED = {
    (
        "B506",
        "config/yaml_tree.py",
    ): "the loader is PyYAML's SafeLoader with two mends; test_no_code_from_files.py tries its tags",
    ("B615", "*"): "folders on disk, never downloads: local_files_only, or a path that was looked at before",
    ("B301", "rewards/sandbox/judge_child.py"): "a child reads what its own parent wrote on a pipe; answers come back as JSON",
    ("B102", "rewards/sandbox/program_child.py"): "running a response is what the sandbox is for",
    ("B102", "rewards/sandbox/tests_child.py"): "so is running the tests of a data row, in a process that is shut in, too",
    (
        "B104",
        "launch/kubernetes.py",
    ): "KubeRay's own check of a head asks its dashboard by the pod's address; Ray wants a token",
    ("B108", "launch/*"): "names of folders that are asked about or mounted, not files that are made",
    ("B108", "cli/submit.py"): "the same",
    ("B301", "weights/intake_ranks.py"): "a server's rank reads what was signed with the server's token, and nothing else",
    ("B301", "platform/peer_memory.py"): "a rank reads what another one of its group sent, as torch.distributed does itself",
    (
        "B108",
        "system/own_temporary.py",
    ): "where mkdtemp makes a folder, for this user alone",
    ("B108", "platform/shared_memory.py"): "a folder of which the free space is asked",
    ("B108", "options/elastic/node_memory.py"): "where a folder is made that must be new, for this user alone",
    ("B108", "options/sandboxes/containers.py"): "the /tmp of a container, which is its own",
    ("B701", "launch/submit.py"): "the templates are batch scripts, not HTML; shellcheck reads what comes out",
}
"""(bandit's test, file below megarl/) → why what it finds there stays."""


def found() -> list[tuple[str, str, str]]:
    """(test, file below megarl/, what it says) of every finding of medium or high severity."""
    logging.getLogger("bandit").setLevel(logging.ERROR)
    manager = BanditManager(BanditConfig(), "file")
    manager.discover_files([str(ROOT / "megarl")], recursive=True)
    manager.run_tests()
    issues = manager.get_issue_list(sev_level="MEDIUM", conf_level="LOW")
    return [(i.test_id, str(Path(i.fname).relative_to(ROOT / "megarl")), f"line {i.lineno}: {i.text}") for i in issues]


def reasons(test: str, file: str) -> list[tuple[str, str]]:
    """The entries of `SHELTERED` that a finding falls under."""
    return [key for key in ((test, file), (test, f"{file.partition('/')[0]}/*"), (test, "*")) if key in SHELTERED]


@pytest.mark.slow
def test_bandit_finds_nothing_that_has_no_reason() -> None:
    issues = found()
    assert issues, "bandit looked at nothing"
    assert [issue for issue in issues if not reasons(*issue[:2])] == []
    used = {key for test, file, _ in issues for key in reasons(test, file)}
    assert SHELTERED.keys() - used == set(), "reasons that nothing needs any more"


def test_no_suppression_hides_in_a_comment() -> None:
    sources = (ROOT / "megarl").rglob("*.py")
    assert [str(path) for path in sources if "# nosec" in path.read_text()] == []
