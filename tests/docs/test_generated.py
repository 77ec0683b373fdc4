"""The pages that follow from the program are those of today's program, and figures in pages those of benchmarks/results/."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megarl import errors
from megarl.cli.commands import COMMANDS
from megarl.config import SupervisedConfig, config_fields
from tests.docs.pages import DOCS, ROOT

COMMAND = "python tools/docs/generate.py"
FIGURES_PAGES = (
    "evidence/benchmarks.md", "evidence/costs.md", "evidence/faults.md", "evidence/learning.md", "evidence/plans.md",
    "evidence/rollouts.md", "evidence/weight_updates.md", "serve.md",
)  # fmt: skip


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "tools/docs/generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["config.md", "cli.md", "errors.md"])
def test_the_page_is_what_the_program_says(generate: ModuleType, name: str) -> None:
    assert (DOCS / name).read_text() == generate.generated()[name], f"docs/{name} is out of date: run `{COMMAND}`"


def test_a_page_that_is_out_of_date_is_named_and_then_written(tmp_path: Path) -> None:
    for name in ("config.md", "cli.md", "errors.md", "gpu_paths.md"):
        (tmp_path / name).write_text((DOCS / name).read_text())
    page = tmp_path / "errors.md"
    page.write_text(page.read_text().replace("ConfigError", "ConfigErrer"))
    command = [sys.executable, *COMMAND.split()[1:], "--folder", str(tmp_path)]
    checked = subprocess.run([*command, "--check"], cwd=ROOT, capture_output=True, text=True)
    assert (checked.returncode, checked.stdout) == (1, "errors.md is out of date\n")
    written = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (written.returncode, written.stdout) == (0, "errors.md written\n")
    assert page.read_text() == (DOCS / "errors.md").read_text()


def test_the_answers_to_changes_at_resume_are_those_of_the_program(generate: ModuleType) -> None:
    assert (DOCS / "checkpoints.md").read_text() == generate.with_answers(DOCS)["checkpoints.md"], f"run `{COMMAND}`"
    assert "| `policy.optimizer` | `name` | refused |" in (DOCS / "checkpoints.md").read_text()


@pytest.mark.parametrize("name", FIGURES_PAGES)
def test_the_tables_are_those_of_the_figures(generate: ModuleType, name: str) -> None:
    assert (DOCS / name).read_text() == generate.with_figures(DOCS)[name], f"docs/{name} is out of date: run `{COMMAND}`"


def test_a_table_that_was_changed_by_hand_is_written_again(generate: ModuleType) -> None:
    text = (DOCS / "evidence/rollouts.md").read_text()
    by_hand = text.replace("1.78 → 2.45", "1.78 → 2.99")
    assert by_hand != text
    assert generate.figures.with_tables("evidence/rollouts.md", by_hand) == text


def test_a_table_tells_when_all_its_figures_were_measured(generate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "old": {"machine": {"date": "2026-11-21"}},
        "new": {"date": "2026-11-29T08:00:00+00:00"},
        "unread": {"date": "2026-11-30"},
    }
    monkeypatch.setattr(generate.results, "figures_of", lambda name: found[name])
    read = generate.results.result
    assert generate.figures.table_with_date(lambda: [str(len(read("new")))]) == ["1", "", "Measured 2026-11-29."]
    both = generate.figures.table_with_date(lambda: [str(len(read("new")) + len(read("old")))])
    assert both == ["2", "", "Measured 2026-11-21 to 2026-11-29."]


def test_a_page_without_the_marks_of_a_table_is_named(generate: ModuleType) -> None:
    text = (DOCS / "evidence/rollouts.md").read_text().replace("<!-- drafts: end -->", "")
    with pytest.raises(SystemExit, match=r"docs/evidence/rollouts\.md lacks the marks of the table 'drafts'"):
        generate.figures.with_tables("evidence/rollouts.md", text)


def test_every_page_with_tables_of_figures_is_looked_at(generate: ModuleType) -> None:
    assert sorted(generate.figures.TABLES) == sorted(FIGURES_PAGES)


def test_sentences_have_the_figures_that_were_measured(generate: ModuleType) -> None:
    import phrases

    missing = {page: phrases.phrases_missing(page, (DOCS / page).read_text()) for page in phrases.PHRASES}
    assert {page: lacks for page, lacks in missing.items() if lacks} == {}


def test_a_step_takes_one_time_wherever_it_is_told(generate: ModuleType) -> None:
    cells = [re.findall(r"[\d.]+ s\b", line) for line in generate.figures.step() if line.startswith("| step")]
    [of_megarl] = [line.split(" | ") for line in generate.figures.against_trl() if line.startswith("| megarl")]
    assert cells == [[of_megarl[2]]]


def test_a_figure_that_is_not_the_measured_one_is_found(generate: ModuleType) -> None:
    import phrases

    text = (DOCS / "speculative.md").read_text().replace("to 2.45 and", "to 2.54 and")
    [phrase] = phrases.phrases_missing("speculative.md", text)
    assert "2.45" in phrase


def test_figures_older_than_their_code_are_named(generate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    results = generate.results
    monkeypatch.setattr(results, "digest", lambda place: "of today" if place == "megarl/weights" else "as it was")
    found = {"code": {"benchmarks/reshard.py": "as it was", "megarl/weights": "then"}}
    monkeypatch.setattr(
        results, "figures_of", lambda name: found if name == "reshard" else {"code": {"megarl/data": "as it was"}}
    )
    assert results.older_than_their_code() == ["benchmarks/results/reshard.json: measured before megarl/weights changed"]


def test_comments_and_empty_lines_are_no_change_of_code(generate: ModuleType) -> None:
    from measured_code import digest_of

    plain = digest_of({"a.py": "x = 1\ny = 2\n"})
    assert digest_of({"a.py": "# why\nx = 1\n\ny = 2\n"}) == plain
    assert digest_of({"a.py": "x = 1\ny = 3\n"}) != plain
    assert digest_of({"b.py": "x = 1\ny = 2\n"}) != plain


def test_all_figures_say_which_code_they_measured_and_when(generate: ModuleType) -> None:
    for path in sorted((ROOT / "benchmarks/results").glob("*.json")):
        assert generate.results.figures_of(path.stem)["code"], path.name
        assert generate.results.measured_on(path.stem) >= "2026-11-21", path.name


def test_every_field_has_a_row() -> None:
    page = (DOCS / "config.md").read_text()
    fields = {field.name for field in [*config_fields(), *config_fields(SupervisedConfig)]}
    assert set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)) == fields


def test_every_command_has_a_heading() -> None:
    headed = re.findall(r"^## `megarl ([\w-]+)", (DOCS / "cli.md").read_text(), re.MULTILINE)
    assert set(headed) == set(COMMANDS)


def test_every_error_has_its_exit_code() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (\d+) \|[^|]*\|$", (DOCS / "errors.md").read_text(), re.MULTILINE))
    kinds = [name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert rows == {name: {"RunStopped": "75", "RunInterrupted": "130"}.get(name, "2") for name in kinds}
