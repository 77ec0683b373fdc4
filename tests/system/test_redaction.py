"""Secrets are told from other text: every form of a key, header, name and URL, and nothing of what runs are made of."""

from __future__ import annotations

import base64
import json
import os
import random
import string
import time
import uuid
from pathlib import Path

import pytest

from megarl.system.redaction import HIDDEN, KNOWN, redacted, redacted_data

ROOT = Path(__file__).parents[2]
RANDOM = random.Random(7)
VALUE = "Hunter-2-quite"


def letters(count: int, of: str = string.ascii_letters + string.digits) -> str:
    return "".join(RANDOM.choice(of) for _ in range(count))


def web_token() -> str:
    parts = [json.dumps({"alg": "HS256"}).encode(), json.dumps({"sub": "1234567890"}).encode(), os.urandom(32)]
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts)


KEYS = {
    "GitLab": f"glpat-{letters(20)}",
    "GitHub": f"ghp_{letters(36)}",
    "GitHub, fine-grained": f"github_pat_{letters(22)}_{letters(59)}",
    "NVIDIA": f"nvapi-{letters(64)}",
    "Google": f"AIza{letters(35)}",
    "JWT": web_token(),
    "Hugging Face": f"hf_{letters(34)}",
    "OpenAI": f"sk-proj-{letters(20)}T3BlbkFJ{letters(20)}",
    "Anthropic": f"sk-ant-api03-{letters(50)}-{letters(42)}AA",
    "AWS": f"AKIA{letters(16, string.ascii_uppercase + '234567')}",
    "Slack": f"xoxb-123456789012-1234567890123-{letters(24)}",
    "PyPI": f"pypi-AgEIcHlwaS5vcmc{letters(80)}",
    "Stripe": f"sk_live_{letters(24)}",
    "private key": f"-----BEGIN RSA PRIVATE KEY-----\n{letters(64)}\n{letters(64)}\n-----END RSA PRIVATE KEY-----",
}
PLACES = ("{}", "the key {} is wrong", "{}, then", "https://host/{}/x", "['{}']", "a\n{}\nb", "({})", "key={}.", "\u00e9: {}")


@pytest.mark.parametrize("service", KEYS)
def test_keys_of_services_are_hidden_wherever_they_stand(service: str) -> None:
    key = KEYS[service]
    secret = key.split("\n")[1] if "\n" in key else key
    for place in PLACES:
        text = place.format(key)
        for shown in (redacted(text), redacted_data(text), json.loads(redacted_data(json.dumps({"text": text})))["text"]):
            assert HIDDEN in shown
            assert not any(secret[start : start + 8] in shown for start in range(len(secret) - 8)), shown
    assert redacted(f"the key {key} is wrong").endswith(" is wrong")


NAMED = [
    "token='{}'", 'token="{}"', "token = '{}'", "pwd={}", "passphrase={}", "jwt={}", "secret_key: {}", "db_password='{}'",
    "X-Api-Key: {}", "api-key: {}", "Authorization: Basic {}", "Authorization: Token {}", "Authorization: Own {} more",
    "{{'Authorization': 'Basic {}'}}", "[('Authorization', 'Token {}')]", "(b'authorization', b'Token {}')",
    "Cookie: session={}; a=b", "Set-Cookie: sid={}; Path=/", "headers={{'Cookie': 'sid={}'}}", "cookies={{'sid': '{}'}}",
    "-H 'X-Api-Key: {}'", '-H "Authorization: Token {}"', 'Authorization: Digest username="x", response="{}"',
    "auth=('me', '{}')", "auth='{}'", "tokens=['{}']", "{{'tokens': ['{}', 'x']}}", "failed with token: {}",
    "--api-key {}", "--password={}", "['--token', '{}']", "API_KEY={} command", "export WANDB_API_KEY={}", "apiKey: '{}'",
    "clientSecret={}", "rewards[0].args.password is '{}', which is wrong", '{{\\"token\\": \\"{}\\"}}', "Bearer {}",
    "https://me:{}@host/x", "postgres://{}@host", "https://h/s?token={}&x=1", "https://h/s?x=1&key={}", "https://h/p?sig={}",
    "GET /score?token={} HTTP/1.1", "https://h/#access_token={}",
]  # fmt: skip


@pytest.mark.parametrize("text", NAMED)
def test_values_of_secret_names_and_headers_are_hidden(text: str) -> None:
    shown = redacted(text.format(VALUE))
    assert VALUE not in shown
    assert HIDDEN in shown


@pytest.mark.parametrize(
    "text", ["Authorization: Basic {}", "Cookie: sid={}", "https://me:{}@host/x", "Bearer {}", "X-Api-Key: {}"]
)
def test_data_loses_headers_and_passwords_of_urls(text: str) -> None:
    key = letters(24)
    line = json.dumps({"text": f"a tool said\n{text.format(key)}\nand 42", "n": 7})
    shown = json.loads(redacted_data(line))
    assert key not in shown["text"]
    assert shown["text"].startswith("a tool said\n")
    assert shown["text"].endswith("\nand 42")
    assert shown["n"] == 7


def test_urls_keep_host_and_path() -> None:
    url = "https://me:secretpw1@judge.example:8443/v1/score?token=abcd1234&version=2#top"
    assert redacted(url) == f"https://{HIDDEN}@judge.example:8443/v1/score?token={HIDDEN}&version={HIDDEN}#top"
    assert redacted("https://judge.example/v1/score, which") == "https://judge.example/v1/score, which"


ORDINARY = [
    "rollout.max_new_tokens=12345678", "'eos_token': '<|endoftext|>'", "me@example.com wrote", "runs/a@b/c", "max_tokens=512",
    "unexpected token: 'weights'", "stop_token_ids=[1, 2]", "tokens=1024", "new_tokens: 12345", "the token is 'x'",
    "token_env: JUDGE_TOKEN", "api_key_env='JUDGE_KEY'", "PWD=/home/me", "it must be 'token', 'sequence' or 'x'", "auth: true",
    "step 12: tokens/s 3456.7", "password is missing", "the secret: a friend", "key 'a' is given twice", "token=None",
    "api_key: null", "password=${MY_PW}", "https://host:8080/a/b", "http://127.0.0.1:5000", "cookie recipe: mix well",
    "/models/Qwen2.5-0.5B-Instruct/model-00001-of-00002.safetensors", "sk-learn-contrib-extra-long", "video_token=3",
    f"1700000000:{uuid.UUID(int=7)}", "a" * 64, "da39a3ee5e6b4b0d3255bfef95601890afd80709", str(uuid.UUID(int=2**127 + 5)),
    "runs/qwen3-grpo/checkpoints/step_000100/policy", "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
]  # fmt: skip


@pytest.mark.parametrize("text", ORDINARY)
def test_what_is_no_secret_is_left_as_it_is(text: str) -> None:
    assert redacted(text) == text
    assert redacted_data(text) == text


def test_data_that_speaks_of_anything_else_is_left_as_it_is() -> None:
    """megarl's own pages and sources, which speak of tokens and keys on every page, and bytes in three writings."""
    files = [*(ROOT / "docs").glob("*.md"), *(ROOT / "megarl").rglob("*.py"), *(ROOT / "benchmarks/results").glob("*.json")]
    assert len(files) > 500
    for file in files:
        text = file.read_text()
        assert redacted_data(text) == text, file
    noise = random.Random(11).randbytes(400_000)
    for text in (base64.b64encode(noise).decode(), noise.hex(), json.dumps(list(noise[:20_000]))):
        assert redacted_data(text) == text


def test_secrets_that_this_process_was_given_are_hidden_in_any_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KNOWN, "k3y-of-mine", "")
    monkeypatch.setenv("OF_A_SERVICE_TOKEN", "an0ther-of-mine")
    monkeypatch.setenv("ITS_PASSWORD", "password")  # a word, which texts have for other reasons
    for hide in (redacted, redacted_data):
        assert hide("I took <k3y-of-mine> and an0ther-of-mine") == f"I took <{HIDDEN}> and {HIDDEN}"
        assert hide("the password was wrong") == "the password was wrong"


REPEATED = [
    "sk-", "eyJ", "eyJ-", "glpat-", "AKIA", "https://", "a:", "token=", "authorization: ", "?a=", "token='", "bearer ",
    "xoxb-1-", "token=(", "((", '="a', "-----BEGIN PRIVATE KEY-----", "a\\\\'",
]  # fmt: skip


@pytest.mark.parametrize("part", REPEATED)
def test_texts_that_repeat_themselves_cost_no_more_than_their_length(part: str) -> None:
    redacted("warm" * 8)
    for hide in (redacted, redacted_data):
        seconds = []
        for length in (20_000, 80_000):
            text = part * (length // len(part))
            began = time.process_time()
            hide(text)
            seconds.append(time.process_time() - began)
        assert seconds[1] < max(8 * seconds[0], 1.0), f"{hide.__name__}: {seconds}"
