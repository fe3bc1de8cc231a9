"""Utterances to learn from: digits read as spectrograms, or recordings."""

from __future__ import annotations

import random
import re
import sys
import wave
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

BANDS = 32  # of a recording's spectrum


Utterance = tuple[Tensor, list[int]]  # frames x features, and the digits that are said


def scanned(count: int, first: int, last: int, seed: int) -> list[Utterance]:
    """Strings of 2 to 5 digits of scikit-learn, with pauses and noise; one frame for a column."""
    scans, rng = load_digits(), random.Random(seed)
    noise = torch.Generator().manual_seed(seed)
    utterances = []
    for _ in range(count):
        chosen = [rng.randrange(first, last) for _ in range(rng.randint(2, 5))]
        pieces = [torch.zeros(2, 8)]
        for index in chosen:
            image = torch.from_numpy(scans.images[index]).float() / 16
            pieces += [image.T, torch.zeros(rng.randint(0, 3), 8)]
        frames = torch.cat(pieces)
        frames = frames + 0.1 * torch.randn(frames.shape, generator=noise)
        utterances.append((frames, [int(scans.target[index]) for index in chosen]))
    return utterances


def recorded(folder: Path) -> list[Utterance]:
    """WAV files, the digits that begin their names, and the logarithm of their spectra."""
    utterances = []
    for path in sorted(folder.glob("*.wav")):
        said = re.match(r"\d+", path.name)
        if said is None:
            sys.exit(
                f"--data {folder}: {path.name} must begin with the digits said, as 407_anna.wav"
            )
        try:
            with wave.open(str(path)) as file:
                rate, width = file.getframerate(), file.getsampwidth()
                channels = file.getnchannels()
                samples = file.readframes(file.getnframes())
        except (wave.Error, EOFError) as error:
            sys.exit(f"--data {folder}: {path.name} is no WAV file: {error}")
        if width != 2 or rate < 8000:
            sys.exit(
                f"--data {folder}: {path.name} has {8 * width} bits a sample and {rate} Hz; it "
                "must have 16 bits and at least 8000 Hz"
            )
        window = rate // 40
        if len(samples) < 2 * channels * window:
            sys.exit(f"--data {folder}: {path.name} is shorter than 25 ms")
        sound = torch.frombuffer(bytearray(samples), dtype=torch.int16).view(-1, channels)
        spectrum = torch.stft(
            sound.float().mean(1) / 2**15,
            n_fft=window,
            hop_length=rate // 100,
            window=torch.hann_window(window),
            return_complex=True,
        )
        bands = nn.functional.adaptive_avg_pool1d(spectrum.abs().square().T, BANDS)
        frames = (bands + 1e-6).log()
        utterances.append((frames - frames.mean(0), [int(digit) for digit in said.group()]))
    if len(utterances) < 10:
        sys.exit(
            f"--data {folder} holds {len(utterances)} WAV files; there must be at least 10, "
            "such as those of the Free Spoken Digit Dataset"
        )
    return utterances


def load_data(folder: Path | None) -> tuple[list[Utterance], list[Utterance]]:
    """Return utterances to train on, and others to test on."""
    if folder is None:
        return scanned(2000, 0, 1400, seed=1), scanned(300, 1400, 1797, seed=2)
    utterances = recorded(folder)
    return [u for i, u in enumerate(utterances) if i % 5], utterances[::5]


def collate(utterances: list[Utterance], device: torch.device) -> tuple[Tensor, ...]:
    """Return frames (batch x features x time), their lengths, all labels, and their numbers."""
    frames = nn.utils.rnn.pad_sequence([frames for frames, _ in utterances], batch_first=True)
    lengths = torch.tensor([len(frames) for frames, _ in utterances])
    labels = torch.tensor([label for _, labels in utterances for label in labels])
    counts = torch.tensor([len(labels) for _, labels in utterances])
    return frames.transpose(1, 2).to(device), lengths, labels, counts
