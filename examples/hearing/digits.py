"""Spoken digits, by espeak-ng: rows that need no download, for `source: python`. Debian has it as the package `espeak-ng`.

    data:
      train: {source: python, name: "examples/hearing/digits.py:spoken_digits", args: {split: train}}
      eval: {source: python, name: "examples/hearing/digits.py:spoken_digits", args: {split: held_out}}
      prompt_key: problem

Each of ten digits is spoken by several voices at two speeds, and each row plays it a little faster or slower, and louder or
less loud. No voice of the held-out split is in the other. Row i of a split depends on i alone.
"""

from __future__ import annotations

import functools
import random
import shutil
import subprocess
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
VOICES = {
    "train": ("en-us", "en-us+m1", "en-us+m2", "en-us+f1", "en-us+f2", "en-gb", "en-gb-scotland", "en-gb-x-rp"),
    "held_out": ("en-us+m3", "en-us+f3", "en+f1", "en-gb-scotland+f2"),
}
SPEEDS = (140, 180)
"""Words per minute."""
PACE, GAIN = (0.9, 1.1), (0.3, 1.0)
"""How fast a row plays what was said, which changes its pitch too, and its largest sample."""
RATE = 16_000
QUIET, PAUSE_S = 0.01, 0.3
"""What is no louder is silence; so long a silence ends a word."""
FIRST_SEED = {"train": 0, "held_out": 1_000_000}


def spoken_digits(split: str = "train", rows: int = 1000, question: str = "Which digit?") -> Iterator[dict[str, Any]]:
    """`rows` rows with a sound under `audios`, the `problem` with its mark, and the `answer`."""
    for row in range(rows):
        chance = random.Random(FIRST_SEED[split] + row)
        digit, voice, speed = chance.randrange(len(WORDS)), chance.choice(VOICES[split]), chance.choice(SPEEDS)
        said, rate = say(voice, speed)
        sound = resampled(said[digit], rate * chance.uniform(*PACE))
        sound *= chance.uniform(*GAIN) / np.abs(sound).max()
        sounds = [{"array": sound, "sampling_rate": RATE}]
        yield {"audios": sounds, "problem": f"<audio>{question}", "answer": str(digit)}


@functools.cache
def say(voice: str, speed: int) -> tuple[list[npt.NDArray[np.float32]], int]:
    """What espeak-ng says, the `[samples]` of each digit, and their rate in Hz; raises SystemExit if it is not installed."""
    if shutil.which("espeak-ng") is None:
        raise SystemExit("espeak-ng is not installed; install Debian's package espeak-ng (`make system-packages`)")
    text = "<speak>" + '<break time="600ms"/>'.join(WORDS) + "</speak>"
    command = ["espeak-ng", "-m", "-v", voice, "-s", str(speed), "--stdout", text]
    done = subprocess.run(command, capture_output=True, check=True)
    samples, rate = soundfile.read(BytesIO(done.stdout), dtype="float32")
    loud = np.flatnonzero(np.abs(samples) > QUIET)
    words = np.split(loud, np.flatnonzero(np.diff(loud) > PAUSE_S * rate) + 1)
    if len(words) != len(WORDS):
        raise SystemExit(f"espeak-ng -v {voice} -s {speed} says {len(words)} words in place of {len(WORDS)}")
    return [samples[word[0] : word[-1] + 1] for word in words], rate


def resampled(samples: npt.NDArray[np.float32], rate: float) -> npt.NDArray[np.float32]:
    """The same at 16 kHz, without the frequencies above 8 kHz: of `rate` Hz, which is higher."""
    length = round(len(samples) * RATE / rate)
    spectrum = np.fft.rfft(samples)[: length // 2 + 1]
    return (np.fft.irfft(spectrum, length) * (length / len(samples))).astype(np.float32)
