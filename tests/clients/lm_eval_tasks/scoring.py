"""The score of the generation task."""

from typing import Any


def contains_answer(document: dict[str, Any], results: list[str]) -> dict[str, float]:
    return {"contains": float(document["answer"].lower() in results[0].lower())}
