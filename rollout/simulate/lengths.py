"""How long simulated rollouts are."""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

_NORMAL = NormalDist()


class Lengths(Protocol):
    """A distribution of response lengths."""

    def length(self, uniform: float) -> int:
        """The length, at least 1, at a point of (0, 1) of its distribution function."""


@dataclass(frozen=True, kw_only=True)
class ConstantLengths:
    """All alike."""

    tokens: int

    def length(self, uniform: float) -> int:
        return self.tokens


@dataclass(frozen=True, kw_only=True)
class LogNormalLengths:
    """The heavy tail that reasoning models have."""

    mean: float
    """Tokens, before the cut."""
    sigma: float = 1.0
    """Of the logarithm."""
    longest: int
    """Longer ones are cut here."""

    def length(self, uniform: float) -> int:
        mu = math.log(self.mean) - self.sigma**2 / 2
        return max(1, min(self.longest, round(math.exp(mu + self.sigma * _NORMAL.inv_cdf(uniform)))))
