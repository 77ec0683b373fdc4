"""A user's own estimator or loss: what it needs is read from its decorator, and whatever is wrong with it is one sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megarl.algorithms.catalogue import EstimatorNeeds, LossNeeds
from megarl.algorithms.user_algorithms import estimator_needs, load_estimator, load_policy_loss, loss_needs
from megarl.errors import ConfigError

FILE = """
from megarl.algorithms import needs
print("a line of the user's own, which is no answer")

@needs(values=True, greedy=True, group=True, token_penalty=False)
def rich(inputs): ...

@needs(old_log_probs=True, rollout_log_probs=True, reference_log_probs=True, teacher_log_probs=True, entropy=True)
def curious(inputs, scale, offset=0.0): ...

def plain(inputs): ...

@needs(rollout_log_probs=True, reference_log_probs=True)
def loss(log_probs, old_log_probs, advantages, *, response, settings, rollout_log_probs, reference_log_probs): ...

@needs(teacher_log_probs=True, entropy=True)
def steered(log_probs, old_log_probs, advantages, *, response, settings, teacher_log_probs, entropy, share): ...

def plain_loss(log_probs, old_log_probs, advantages, *, response, settings): ...

@needs(rollout_log_probs=True)
def deaf_loss(log_probs, old_log_probs, advantages, *, response, settings): ...

def no_argument(): ...

twelve = 12
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of the user's with all the functions above."""
    path = tmp_path / "my own.py"
    path.write_text(FILE)
    return path


def test_needs_are_those_of_the_decorator_and_none_without_it(file: Path) -> None:
    assert estimator_needs(f"{file}:rich") == EstimatorNeeds(values=True, greedy=True, group=True, token_penalty=False)
    assert estimator_needs(f"{file}:plain") == EstimatorNeeds()
    assert loss_needs(f"{file}:loss") == LossNeeds(rollout_log_probs=True, reference_log_probs=True)
    assert loss_needs(f"{file}:loss").columns == ("rollout_log_probs", "reference_log_probs")
    assert loss_needs(f"{file}:plain_loss") == LossNeeds()


def test_arguments_of_the_config_are_part_of_the_call(file: Path) -> None:
    everything = EstimatorNeeds(
        old_log_probs=True, rollout_log_probs=True, reference_log_probs=True, teacher_log_probs=True, entropy=True
    )
    assert estimator_needs(f"{file}:curious", ("scale",)) == everything
    assert estimator_needs(f"{file}:curious", ("scale", "offset")) == everything
    assert load_estimator(f"{file}:curious", ("scale",)).__name__ == "curious"
    steered = loss_needs(f"{file}:steered", ("share",))
    assert steered == LossNeeds(teacher_log_probs=True, entropy=True)
    assert (steered.columns, steered.further) == (("teacher_log_probs",), ("teacher_log_probs", "entropy"))
    with pytest.raises(ConfigError, match="missing a required argument: 'scale'"):
        estimator_needs(f"{file}:curious")
    with pytest.raises(ConfigError, match="got an unexpected keyword argument 'sacle'"):
        estimator_needs(f"{file}:plain", ("sacle",))
    with pytest.raises(ConfigError, match="missing a required argument: 'share'"):
        loss_needs(f"{file}:steered")


def test_a_module_in_the_working_directory_is_found_by_its_import_path(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file.parent / "own_module_of_this_test.py").write_text(FILE)
    monkeypatch.chdir(file.parent)
    assert estimator_needs("own_module_of_this_test:rich").greedy
    assert load_estimator("own_module_of_this_test:rich").__name__ == "rich"


def test_reading_needs_imports_neither_torch_nor_the_users_file_here(file: Path) -> None:
    file.write_text(f"import torch\n{FILE}")
    code = (
        "import sys; from megarl.algorithms.user_algorithms import estimator_needs;"
        f"print(estimator_needs({f'{file}:rich'!r}).values, 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "True False\n"


def test_functions_of_one_file_share_its_module(file: Path) -> None:
    assert load_estimator(f"{file}:rich").__globals__ is load_policy_loss(f"{file}:loss").__globals__


BAD_FILES = [
    ("raise ValueError('not today')", "f", "cannot be imported: ValueError: not today"),
    ("import sys; sys.exit(3)", "f", "cannot be imported: SystemExit: 3"),
    ("import os; os._exit(3)", "f", "ended the process that imported it, with exit code 3"),
    ("def f(:", "f", "cannot be imported: SyntaxError"),
    ("def fg(inputs): ...", "f", r"has no function 'f' \(did you mean 'fg'\?\); it has fg"),
    ("f = 12", "f", "has no function 'f'"),
    ("def f(): ...", "f", r"must be callable as an advantage estimator is, f\(inputs\), but too many positional"),
    ("def f(inputs, other): ...", "f", "but missing a required argument: 'other'"),
    (
        "from megarl.algorithms import needs\n@needs(critic=True)\ndef f(inputs): ...",
        "f",
        "cannot be imported: TypeError: needs.. got an unexpected keyword argument 'critic'",
    ),
]


@pytest.mark.parametrize(("text", "function", "sentence"), BAD_FILES)
def test_what_is_wrong_with_a_users_file_is_one_sentence(text: str, function: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=sentence) as error:
        estimator_needs(f"{tmp_path / 'mine.py'}:{function}")
    assert str(error.value).startswith("algorithm.advantage: '")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("deaf_loss", "but got an unexpected keyword argument 'rollout_log_probs'"),
        ("plain", r"as a policy loss is, f\(log_probs, old_log_probs, advantages, response=..., settings=...\), but"),
        ("rich", "needs group, values, greedy, token_penalty, which a policy loss is not given"),
        ("lost", "has no function 'lost'"),
    ],
)
def test_what_is_wrong_with_a_users_loss_is_one_sentence(function: str, sentence: str, file: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        loss_needs(f"{file}:{function}")
    with pytest.raises(ConfigError, match=sentence):
        load_policy_loss(f"{file}:{function}")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(inputs): ...")
    with pytest.raises(ConfigError, match=r"there is no file .*/mien\.py \(did you mean '.*/mine\.py'\?\)"):
        estimator_needs(f"{tmp_path / 'mien.py'}:f")
