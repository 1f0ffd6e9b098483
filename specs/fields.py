"""Field types of documents: numbers that are numbers. Text, booleans and fractions never pass as a count."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

#: A whole number of at least 1; ``"8"``, ``8.0`` and ``true`` are refused.
Count = Annotated[int, Field(strict=True, ge=1, le=2**63 - 1)]
#: A finite number above 0; text and booleans are refused.
Positive = Annotated[float, Field(strict=True, gt=0)]
#: A finite number of at least 0; text and booleans are refused.
NonNegative = Annotated[float, Field(strict=True, ge=0)]
#: A ratio of at least 1; text and booleans are refused.
Ratio = Annotated[float, Field(strict=True, ge=1)]
