"""From logits to a token, with noise that depends on seed and position alone.

A token is drawn by the Gumbel rule: argmax over the vocabulary of log p + G, where G is Gumbel noise
made by a counter-based generator (Philox) keyed by (seed, position). The token then follows p exactly,
and nothing else can shift the noise: not the draft, not a rejected proposal, not a cancelled answer.

The draft proposes with the same noise. Its proposal is the token the target will draw whenever their
two argmaxes agree, so acceptance is high without the draft ever entering the target's choice: the text
is the same with any draft and with none. Coupling by shared Gumbel noise: Daliri, Musco, Suresh,
"Coupling without Communication and Drafter-Invariant Speculative Decoding", arXiv 2408.07978, section 3.

Order of the filters, as in Hugging Face: penalties, temperature, top-k, top-p, min-p. All of them, and
the argmax, run where the logits are. A GPU gets the noise, which the host makes while it computes: behind
captured passes tokens are drawn by graphs (`drawing.py`); else noise is kept for a while, since draft and
target want the same, the GPU returns two numbers a row, and the host waits once.
There the sum over the vocabulary may round otherwise than on the CPU, so that a token whose better ones
hold `top_p` to the last bit may fall on either side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from spmoe_lite.config import SamplingParams
from spmoe_lite.device import read_back, send
from spmoe_lite.errors import SpmoeError

KEPT = 16  # positions whose noise is kept: those of one step


class Sampler:
    """Chooses tokens for one answer: parameters, and where the prompt ends (penalties look at it)."""

    def __init__(self, params: SamplingParams, num_tokens: int, prompt_length: int):
        self.params = params
        self.num_tokens = num_tokens  # ids from here on are padding and never chosen
        self.prompt_length = prompt_length
        self._filters = params.temperature > 0 or _penalizes(params)
        self._noises: dict[
            int, torch.Tensor
        ] = {}  # position -> its noise, where it was wanted last

    def pick_row(self, logits: torch.Tensor, context: Sequence[int]) -> int:
        """The token after `context`; logits [V] of any float dtype, filtered where they are."""
        tokens, finite = self.pick_rows(logits[None], [context])
        check_finite(finite[0])
        return tokens[0]

    def pick_rows(
        self, logits: torch.Tensor, contexts: Sequence[Sequence[int]]
    ) -> tuple[list[int], list[bool]]:
        """The token of each row of logits [T, V] after its context, and whether its logits are finite."""
        if not self._filters:
            best = logits[:, : self.num_tokens].max(dim=1)
            return _read(best.indices, best.values.isfinite())
        tokens, finite = [], []
        for row, context in zip(logits[:, : self.num_tokens].float(), contexts, strict=True):
            finite.append(row.max().isfinite())
            noise = self.noise(len(context), row.device)
            tokens.append(draw(self._penalized(row, context), noise, self.params))
        return _read(torch.stack(tokens), torch.stack(finite))

    def noise(self, position: int, device: torch.device) -> torch.Tensor | None:
        """Gumbel noise [num_tokens] fp64 of one position; None at temperature 0."""
        if self.params.temperature == 0:
            return None
        if position not in self._noises:
            while len(self._noises) >= KEPT:
                self._noises.pop(next(iter(self._noises)))
            self._noises[position] = send(self.made_noise(position), device)
        return self._noises[position].to(device)

    @property
    def greedy(self) -> bool:
        """Whether `pick_greedy` may be used: the choice of a row needs no context."""
        return not self._filters

    @property
    def draws_alone(self) -> bool:
        """Whether tokens are drawn, and a row's logits and position are all that a draw takes."""
        return self.params.temperature > 0 and not _penalizes(self.params)

    def pick_greedy(self, logits: torch.Tensor) -> list[int]:
        """The best token of each row of logits [T, V], found on the device."""
        best = logits[:, : self.num_tokens].max(dim=1)
        tokens, finite = _read(best.indices, best.values.isfinite())
        check_finite(all(finite))
        return tokens

    def made_noise(self, position: int) -> torch.Tensor:
        """The noise [num_tokens] fp64 of a position, made on the host: the same on every machine."""
        key = np.array([self.params.seed % 2**64, position], dtype=np.uint64)
        uniform = np.random.Generator(np.random.Philox(key=key)).random(self.num_tokens)
        with np.errstate(divide="ignore"):  # a uniform of exactly 0 is noise of minus infinity
            return torch.from_numpy(-np.log(-np.log(uniform)))

    def _penalized(self, row: torch.Tensor, context: Sequence[int]) -> torch.Tensor:
        """Repetition penalty over the whole context; presence and frequency over the answer only."""
        p = self.params
        if not _penalizes(p):
            return row
        row = row.clone()
        if p.repetition_penalty != 1.0:
            seen = _ids({t for t in context if t < self.num_tokens}, row.device)
            values = row[seen]
            scaled = torch.where(
                values > 0, values / p.repetition_penalty, values * p.repetition_penalty
            )
            row[seen] = scaled
        answer = Counter(t for t in context[self.prompt_length :] if t < self.num_tokens)
        if answer and (p.presence_penalty or p.frequency_penalty):
            counts = torch.tensor(list(answer.values()), dtype=torch.float32)
            penalty = p.presence_penalty + p.frequency_penalty * counts
            row[_ids(answer, row.device)] -= send(penalty, row.device)
        return row


def draw(row: torch.Tensor, noise: torch.Tensor | None, params: SamplingParams) -> torch.Tensor:
    """The token [] int64 of logits [V] fp32, penalties done; noise [V] fp64, None at temperature 0."""
    if noise is not None:
        row = _filtered(_tempered(row, params.temperature), params).double() + noise
    return row.argmax()


def probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The law `Sampler` draws from, penalties aside: logits [V] to probabilities [V] fp64."""
    if params.temperature == 0:
        one_hot = torch.zeros(len(logits), dtype=torch.float64)
        one_hot[int(logits.argmax())] = 1
        return one_hot
    return _filtered(_tempered(logits.float(), params.temperature), params).double().softmax(0)


def _penalizes(p: SamplingParams) -> bool:
    return bool(p.repetition_penalty != 1.0 or p.presence_penalty or p.frequency_penalty)


def _tempered(row: torch.Tensor, temperature: float) -> torch.Tensor:
    """Logits over temperature, the best one at 0: however small the temperature, it stays finite."""
    best = row.max()
    return (row - best) / torch.full_like(best, max(temperature, 1e-30))


def _filtered(row: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Top-k, top-p and min-p on scaled logits [V]: what is cut becomes minus infinity."""
    if 0 < params.top_k < len(row):
        threshold = row.topk(params.top_k).values[-1]
        row = row.masked_fill(row < threshold, float("-inf"))
    if params.top_p < 1.0:
        probs = row.softmax(0)
        ordered = _head(probs, params.top_p)
        # Probability of everything better. A GPU adds in no fixed order: in fp64 that does not show.
        before = ordered.cumsum(0, dtype=torch.float64) - ordered
        last = (before < params.top_p).sum(0, keepdim=True).clamp(min=1) - 1
        row = row.masked_fill(probs < ordered.gather(0, last), float("-inf"))
    if params.min_p > 0.0:
        floor = row.max() + float(np.log(params.min_p))
        row = row.masked_fill(row < floor, float("-inf"))
    return row


def _head(probs: torch.Tensor, mass: float, guess: int = 512) -> torch.Tensor:
    """The largest probabilities in order, enough of them to hold `mass`.

    A full sort costs a GPU little and a CPU much: there it is rare.
    """
    if len(probs) > guess and not probs.is_cuda:
        head = probs.topk(guess).values
        if float(head.sum()) > mass + 1e-4:
            return head
    return probs.sort(descending=True).values


def _ids(tokens: Iterable[int], device: torch.device) -> torch.Tensor:
    return send(torch.tensor(list(tokens), dtype=torch.long), device)


def _read(tokens: torch.Tensor, finite: torch.Tensor) -> tuple[list[int], list[bool]]:
    """Both [T] on the host, in one copy."""
    both: list[list[int]] = read_back(torch.stack((tokens, finite.long()))).tolist()
    return both[0], [bool(one) for one in both[1]]


def check_finite(finite: bool) -> None:
    """SpmoeError unless all logits that are about to be sampled were finite."""
    if not finite:
        raise SpmoeError(
            "the model produced non-finite logits: nothing was sampled; "
            "check the pack with `spmoe-lite verify`, or use a wider precision (of int8 caches: --kv-type auto)"
        )
