"""What `bench` asks: six prompts of three kinds, or those of a file."""

from __future__ import annotations

import json

from spmoe_lite.errors import UsageError

PROMPTS = (  # prose, code, conversation
    "Write the opening of a story about a lighthouse keeper who finds a letter in a bottle.",
    "Explain in two paragraphs why the sea is salty and most lakes are not.",
    "Write a Python function that merges two sorted lists into one sorted list.",
    "Write a SQL query that finds the three customers who spent the most in each month.",
    "Hi! My train is two hours late and I am stuck at the station. What could I do?",
    "I would like to cook something warm tonight, with potatoes and leeks. Any ideas?",
)


def parse_prompts(text: str, name: str) -> list[str]:
    """One prompt a line, or JSON lines with "prompt"; empty lines are none.

    Lines end at a line feed alone: JSON may hold every other character that ends one somewhere.
    """
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise UsageError(f'{name} holds no prompt: one a line, or JSON lines with "prompt"')
    if not lines[0][1].lstrip().startswith("{"):
        return [line.removesuffix("\r") for _, line in lines]
    found = {number: _json_prompt(line) for number, line in lines}
    if bad := [number for number, prompt in found.items() if prompt is None]:
        raise UsageError(f'{name}, line {bad[0]}: no JSON object with a text as "prompt"')
    return [prompt for prompt in found.values() if prompt]


def _json_prompt(line: str) -> str | None:
    try:
        prompt = json.loads(line)["prompt"]
        prompt.encode()  # half a surrogate pair is no text
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return prompt if isinstance(prompt, str) and prompt else None
