"""megarl report, compare, samples and chat: what they write and print, and the sentences that bad input gets."""

from __future__ import annotations

import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.cli import main
from megarl.config import Layout
from megarl.convert.plan import plan_dist
from megarl.convert.run import run_plan
from megarl.convert.sources import open_hf
from megarl.models.transformers_names import config_in_transformers
from megarl.observe.chat import load_model
from megarl.observe.page_samples import TOKENS
from megarl.observe.plots import band
from megarl.observe.report import POINTS, SPANS, as_inert_json, page_data
from megarl.observe.run_record import differences, read_run, repetitions
from megarl.option_list import OPTIONS
from tests.families import build_folder
from tests.observe.recorded import HARM, as_served, show_between_turns, show_pictures, write_run

TINY = Path(__file__).parents[2] / "models" / "tiny-arithmetic"


def test_a_report_is_one_file_with_a_trace_and_a_picture_beside_it(tmp_path, capsys) -> None:
    run = write_run(tmp_path / "r")
    trace, png = tmp_path / "trace.json", tmp_path / "reward.png"
    assert main(["report", str(run), "--trace", str(trace), "--png", str(png)]) == 0
    assert str(run / "report.html") in capsys.readouterr().out
    page = (run / "report.html").read_text()
    names = "http://www.w3.org/2000/svg|http-equiv|https://github.com/leeoniya/uPlot"
    assert "http" not in re.sub(names, "", page)  # nothing to load
    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == 12 * 4
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("value", [HARM, "<!--", "\u2028", "]]>", "&lt;"])
def test_json_in_a_page_means_the_same_and_holds_no_markup(value: str) -> None:
    text = as_inert_json({value: [value, float("nan"), 1.5]})
    assert json.loads(text) == {value: [value, None, 1.5]}
    assert not set(text) & set("<>&\u2028\u2029")


def test_seeds_belong_together_and_other_configs_apart(tmp_path) -> None:
    runs = [read_run(write_run(tmp_path / n, seed=s, lr=lr)) for n, s, lr in (("a", 0, 1.0), ("b", 0, 2.0), ("c", 1, 1.0))]
    assert repetitions(runs) == [[0, 2], [1]]
    assert differences(runs)["policy.optimizer.lr"] == [1.0, 2.0, 1.0]
    assert list(differences(runs)) == ["run.name", "run.seed", "policy.optimizer.lr"]


def test_a_band_is_over_the_steps_that_all_seeds_have() -> None:
    assert band([{1: 0.0, 2: 1.0, 3: 9.0}, {1: 1.0, 2: 4.0}]) == ([1, 2], [0.0, 1.0], [0.5, 2.5], [1.0, 4.0])


def test_a_long_run_makes_a_page_of_bounded_size(tmp_path) -> None:
    run = write_run(tmp_path / "r", steps=1500)
    long = [json.loads(line) | {"response_ids": [1] * 8000} for line in (run / "samples.jsonl").read_text().splitlines()]
    (run / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in long))
    record = read_run(run)
    spans = {f"policy {rank}": [["update", 0.0, 1.0]] * 4 for rank in range(64)}
    record = replace(record, trace=[{"step": step, "spans": spans} for step in range(1, 1501)])
    (data,) = page_data([record])["runs"]
    assert len(data["samples"]) == len(long) == 6000
    numbers = ["pieces" in sample for sample in data["samples"]]  # those of the newest samples alone
    assert sum(numbers) == TOKENS // 8000
    assert numbers == sorted(numbers)
    assert len(data["steps"]) == len(data["curves"]["reward/mean"]) <= POINTS + 1
    assert (data["steps"][0], data["steps"][-1]) == (0, 1500)
    assert sum(len(spans) for row in data["trace"] for spans in row["spans"].values()) <= SPANS
    assert data["trace"][-1]["step"] == 1500


def test_compare_takes_an_evaluation_s_last_value_and_leaves_step_0_out(tmp_path, capsys) -> None:
    for name, rows in {
        "a": [{"step": 0, "eval/accuracy": 0.0, "reward/mean": 100.0}, {"step": 1, "reward/mean": 0.25},
              {"step": 2, "reward/mean": 0.75, "eval/accuracy": 0.09375}],
        "b": [{"step": 0, "eval/accuracy": 0.5}, {"step": 1, "reward/mean": 0.125}],
    }.items():  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["eval/accuracy", "0.09375", "0.5"] in rows
    assert ["reward/mean", "0.5", "0.125"] in rows


def test_compare_groups_metrics_in_order_leaves_out_zeros_and_fits_a_narrow_terminal(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = ("a", "b-run-with-a-name-of-more-than-a-column", "c", "d")
    for number, name in enumerate(names):
        rows = [
            {"step": step, "time/step_s": 2.0, "reward/std": 0.25, "kl/reference": 0, "guards/skipped": 0.0,
             "reward/mean": number + 0.5, "time_fraction/a_phase_with_a_long_name": 0.125}
            for step in (1, 2)
        ]  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / name / "config.yaml").write_text(f"model: {{path: /a/path/that/is/long/enough/to/need/two/lines/{name}}}\n")
    assert main(["compare", *(str(tmp_path / name) for name in names)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    begin = next(number for number, line in enumerate(lines) if "mean of the last" in line)
    figures = [line.split() for line in lines[begin:] if "/" in line and "steps;" not in line]
    order = ["reward/mean", "reward/std", "time/step_s", "time_fraction/a_phase_with_a_long_name"]
    assert [name for name, *_ in figures] == 2 * order  # two tables below each other
    assert figures[0] + figures[4][1:] == ["reward/mean", "0.5", "1.5", "2.5", "3.5"]
    at = lines.index(next(line for line in lines if line.startswith("reward/std")))
    assert not lines[at + 1].strip()
    assert "left out: 2 metrics with 0 at every step of every run" in lines
    assert "".join("".join(lines[:begin]).split()).count("/two/lines/") == 4


def test_compare_prints_fields_and_means(tmp_path, capsys) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", lr=3e-5, seed=1)]
    assert main(["compare", *map(str, runs), "--out", str(tmp_path / "c.html")]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["policy.optimizer.lr", "1e-05", "3e-05"] in rows
    assert ["reward/mean", "0.375", "0.475"] in rows  # of steps 3 to 12
    assert (tmp_path / "c.html").exists()


def test_samples_are_found_by_step_reward_and_text(tmp_path, capsys) -> None:
    run = str(write_run(tmp_path / "r"))

    def heads(*options: str) -> list[str]:
        assert main(["samples", run, *options]) == 0
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]

    assert heads("--step", "4", "--best", "--count", "1") == ["step 4  row-4@0/3  reward 0.75 (exact_number 0.75)  stop"]
    assert heads("--worst", "--grep", "IS 7", "--count", "2")[0].startswith("step 7  row-7@0/0  reward 0 ")
    assert heads()[0].startswith("step 12 ")


def test_samples_of_a_server_have_a_tenant_and_a_model_and_no_reward(tmp_path, capsys) -> None:
    run = write_run(tmp_path / "r")
    as_served(run)
    with (run / "samples.jsonl").open("a") as file:
        rewarded = json.loads((write_run(tmp_path / "other") / "samples.jsonl").read_text().splitlines()[0])
        file.write(json.dumps(rewarded) + "\n")
    for order in ("--best", "--worst"):
        assert main(["samples", str(run), order, "--count", "2"]) == 0
        heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
        assert heads[0] == "step 1  row-1@0/0  reward 0 (exact_number 0)  stop", "those with a reward come first"
        assert heads[1] == "step 1  row-1@0/0  tenant bob  model tinker://bob/sampler_weights/a  stop"


def test_samples_are_searched_where_the_policy_spoke_by_role_and_by_turn(tmp_path, capsys) -> None:
    run = write_run(tmp_path / "r")
    sample = json.loads((run / "samples.jsonl").read_text().splitlines()[0]) | {"prompt_text": "system: use tool_call"}
    calls = [
        {"role": "assistant", "content": "<tool_call>add</tool_call>"},
        {"role": "tool", "content": "five"},
        {"role": "assistant", "content": "It is 5."},
    ]
    lines = [
        sample | {"sample_id": "calls", "turns": calls, "response_text": "<tool_call>add</tool_call>fiveIt is 5."},
        sample | {"sample_id": "talks", "turns": [], "response_text": "It is five."},
    ]
    (run / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def shown(*options: str) -> list[str]:
        assert main(["samples", str(run), *options]) == 0
        return [line.split()[2] if line.startswith("step ") else line for line in capsys.readouterr().out.splitlines() if line]

    assert shown("--grep", "TOOL_CALL")[0::99] == ["calls"]
    assert shown("--grep", "tool_call")[-1] == "1 of 1 sample"
    assert shown("--grep", "tool_call", "--role", "prompt") == [
        "calls", "system: use tool_call", "talks", "system: use tool_call", "2 of 2 samples"
    ]  # fmt: skip
    assert shown("--grep", "five", "--role", "assistant") == ["talks", "It is five.", "1 of 1 sample"]
    assert shown("--role", "tool") == ["calls", "tool: five", "1 of 1 sample"]
    assert shown("--turn", "3") == ["calls", "assistant: It is 5.", "1 of 1 sample"]
    assert shown("--turn", "1", "--grep", "add")[:2] == ["calls", "assistant: <tool_call>add</tool_call>"]
    assert main(["samples", str(run), "--role", "asistant"]) == 2
    assert "no such sample; its roles are assistant, prompt, tool (did you mean 'assistant'?)" in capsys.readouterr().err


@pytest.mark.skipif("pictures" not in OPTIONS, reason="needs the option pictures")
def test_samples_show_pictures_in_their_turns(tmp_path, capsys) -> None:
    run = write_run(tmp_path / "r")
    _, second = show_pictures(run)
    show_between_turns(run, second)
    assert main(["samples", str(run), "--step", "1", "--count", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"picture 2: {run}/media/{second}.png, 896x448 px, 2 tokens" in lines
    assert lines[lines.index("question 1") :][1:4] == ["assistant: look", "user: see [picture 2]!", "assistant: two"]
    assert main(["samples", str(run), "--grep", "USER: see [picture"]) == 0  # neither in a prompt nor in a last turn
    assert "user: see [picture 2]!" in capsys.readouterr().out


@pytest.mark.skipif("pictures" not in OPTIONS, reason="needs the option pictures")
def test_samples_name_their_pictures(tmp_path, capsys) -> None:
    run = write_run(tmp_path / "r")
    digests = show_pictures(run)
    assert main(["samples", str(run), "--step", "1", "--count", "2"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("picture")]
    assert lines == [f"picture 1: {run}/media/{digest}.png, 896x448 px, 512 tokens" for digest in digests]


def test_a_sample_cannot_steer_the_terminal(tmp_path, capsys) -> None:
    run = write_run(tmp_path / "r")
    sample = json.loads((run / "samples.jsonl").read_text().splitlines()[0])
    sample["response_text"] = "[bold]x[/bold] \x1b]0;taken over\x07"
    (run / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    main(["samples", str(run)])
    assert "[bold]x[/bold] \\x1b]0;taken over" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["report", "nowhere"], "nowhere holds no run: there is no metrics.jsonl in it"),
        (["report", "R", "--png", "x.png", "--metric", "reward/maen"], "no such metric (did you mean 'reward/mean'?)"),
        (["report", "R", "--watch", "--out", "x.html"], "--watch serves the page and writes no file: leave --out out"),
        (["report", "R", "--watch", "--port", "70000"], "--port is 70000, but it must be 0 to 65535"),
        (["compare", "R"], "megarl compare needs two runs or more"),
        (["samples", "R", "--step", "99"], "--step is 99, but samples were written of steps 1 to 12"),
        (["samples", "R", "--grep", "nobody says this"], "holds no such sample"),
        (["chat", "nowhere"], "nowhere is no Hugging Face folder, no checkpoint and no run"),
        (["chat", "R"], "no checkpoint and no run that has one"),
    ],
)
def test_bad_input_is_a_sentence(arguments, sentence, tmp_path, capsys) -> None:
    run = str(write_run(tmp_path / "r"))
    assert main([run if word == "R" else word for word in arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_a_folder_that_is_no_run_leads_to_the_runs_beside_it_or_in_it(tmp_path, capsys) -> None:
    write_run(tmp_path / "own-grpo")
    for command in (["report"], ["samples"], ["chat"], ["compare", str(tmp_path / "own-grpo")]):
        assert main([*command, str(tmp_path / "ow")]) == 2
        assert f"(did you mean '{tmp_path}/own-grpo'?)" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert "but it has the runs own-grpo; give the folder" in capsys.readouterr().err


def test_a_file_that_is_not_what_a_run_writes_is_named(tmp_path, capsys) -> None:
    run = write_run(tmp_path / "r")
    samples = (run / "samples.jsonl").read_text()
    (run / "samples.jsonl").write_text(f"{samples}not JSON\n[]\n")
    assert main(["report", str(run)]) == 0
    said = capsys.readouterr().err
    assert f"{run}/samples.jsonl: 2 lines are damaged or not of this file, and left out (first line 49, Invalid JSON" in said
    assert said.count("\n") == 1


needs_tiny = pytest.mark.skipif(not (TINY / "config.json").exists(), reason="needs models/tiny-arithmetic (make tiny-model)")


@needs_tiny
def test_chat_answers_each_line_as_the_model_would(monkeypatch, capsys) -> None:
    lines = ["Calculate 2 + 3.\n", "\n", "Calculate 4 + 4.\n", "/quit\n", "Calculate 1 + 1.\n"]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(lines)))
    assert main(["chat", str(TINY), "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out.splitlines() == [_greedy("Calculate 2 + 3."), _greedy("Calculate 4 + 4.")]


@needs_tiny
@pytest.mark.parametrize(
    ("rollout", "options", "given"),
    [
        ({"stop": ["7"], "stop_token_ids": [4]}, [], {"stop": ["7"], "stop_token_ids": [4]}),
        ({"stop": ["7"]}, ["--stop", "8", "--stop", "9"], {"stop": ["8", "9"], "stop_token_ids": ()}),
        ({}, [], {"stop": (), "stop_token_ids": ()}),
    ],
)
def test_chat_has_the_stops_of_its_run_or_of_the_command(rollout, options, given, tmp_path, monkeypatch) -> None:
    run, seen = write_run(tmp_path / "r"), []
    (run / "model").symlink_to(TINY.resolve())
    (run / "config.yaml").write_text(json.dumps({"rollout": rollout}))
    monkeypatch.setattr("megarl.observe.chat.chat", lambda *_, **told: seen.append({name: told[name] for name in given}))
    assert main(["chat", str(run), *options]) == 0
    assert seen == [given]


@needs_tiny
def test_chat_refuses_stops_that_are_none_in_a_sentence(capsys) -> None:
    assert main(["chat", str(TINY), "--stop", ""]) == 2
    assert "rollout.stop[0] is '', which would end every response at once" in capsys.readouterr().err
    assert main(["chat", str(TINY), "--stop", "\u4f60"]) == 2
    assert "rollout.stop[0] is '\u4f60', which cannot be encoded" in capsys.readouterr().err


@needs_tiny
def test_chat_answers_an_unknown_command_with_those_that_there_are_and_says_that_it_loads(monkeypatch, capsys) -> None:
    lines = ["/help\n", "/clear all\n", " /4 + 4\n", "/usr/bin\n"]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(lines)))
    assert main(["chat", str(TINY), "--max-new-tokens", "4"]) == 0
    output = capsys.readouterr()
    told = "the commands are /new, which forgets what was said, and /quit; a line that begins with a space is sent as it is"
    assert output.out.splitlines() == [
        f"/help is no command; {told}", f"/clear is no command; {told}", _greedy("/4 + 4"), _greedy("/usr/bin")
    ]  # fmt: skip
    assert output.err == f"loading {TINY}\n"


@needs_tiny
def test_chat_with_a_run_has_its_system_prompt(tmp_path, monkeypatch, capsys) -> None:
    run = write_run(tmp_path / "r")
    (run / "model").symlink_to(TINY.resolve())
    for prompt, shown in (("Be brief.", "Be brief."), (None, None)):
        (run / "config.yaml").write_text(json.dumps({"data": {"system_prompt": prompt}}))
        given: list[str | None] = []
        monkeypatch.setattr("megarl.observe.chat.chat", lambda *_, given=given, **told: given.append(told["system_prompt"]))
        assert main(["chat", str(run)]) == 0
        assert given == [prompt]
        assert ("system prompt of the run: Be brief." in capsys.readouterr().out) is (shown is not None)


@needs_tiny
def test_chat_loads_a_model_that_transformers_has_under_another_name(tmp_path) -> None:
    build_folder("kimi_k2", tmp_path / "model")
    loaded = load_model(tmp_path / "model", config_in_transformers(tmp_path / "model"))
    assert type(loaded).__name__ == "DeepseekV3ForCausalLM"


def test_chat_takes_the_newest_checkpoint_of_a_run(tmp_path, monkeypatch, capsys) -> None:
    """The second checkpoint has the model's weights, the first one others."""
    run = write_run(tmp_path / "r")
    (run / "config.yaml").write_text(f"model: {{path: {TINY}}}\n")
    for step, model in ((1, _with_other_weights(tmp_path / "other")), (2, TINY)):
        weights = run / "checkpoints" / f"step_{step:06d}" / "policy"
        run_plan(plan_dist("import", open_hf(model), Layout(), None), weights)
        shutil.rmtree(weights / "hf")  # a run's checkpoint has none
    monkeypatch.setattr("sys.stdin", io.StringIO("Calculate 2 + 3.\n"))
    assert main(["chat", str(run), "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out.splitlines() == [_greedy("Calculate 2 + 3.")]


def _with_other_weights(folder: Path) -> Path:
    from safetensors.torch import load_file, save_file

    shutil.copytree(TINY, folder)
    file = folder / "model.safetensors"
    save_file({name: tensor.flip(0).contiguous() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return folder


def _greedy(prompt: str) -> str:
    """The model's answer without a cache, token by token."""
    tokenizer, model = AutoTokenizer.from_pretrained(TINY), AutoModelForCausalLM.from_pretrained(TINY, dtype="auto")
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    start = ids.shape[1]
    for _ in range(4):
        with torch.no_grad():
            token = model(ids).logits[0, -1].argmax()
        ids = torch.cat([ids, token.view(1, 1)], dim=1)
        if token == tokenizer.eos_token_id:
            break
    return tokenizer.decode(ids[0, start:], skip_special_tokens=True)
