"""Text to token ids and back. A tokenizer is data: `to_dict` goes into meta.json and into every checkpoint."""

from collections.abc import Iterable
from typing import Any

from errors import UsageError


class CharTokenizer:
    """One token per character of a fixed alphabet, and the separator BOS as the last id.

    BOS stands before and after every document: it starts a text when sampling, and drawing it ends one.
    """

    def __init__(self, characters: Iterable[str]):
        self.characters = "".join(sorted(set(characters)))
        self.bos_id = len(self.characters)
        self.vocab_size = len(self.characters) + 1
        self._id_of = {character: i for i, character in enumerate(self.characters)}

    def encode(self, text: str) -> list[int]:
        """The ids of the characters, without BOS; UsageError names the characters that have none."""
        try:
            return [self._id_of[character] for character in text]
        except KeyError:
            unknown = ", ".join(repr(c) for c in sorted(set(text) - set(self.characters)))
            raise UsageError(
                f"{unknown} cannot be encoded: the model knows only the characters {self.characters!r}"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; BOS is not part of any text and decodes to nothing."""
        return "".join(self.characters[i] for i in ids if i != self.bos_id)

    def to_dict(self) -> dict[str, Any]:
        return {"type": "char", "characters": self.characters}


def from_dict(data: dict[str, Any]) -> CharTokenizer:
    """The tokenizer that `to_dict` described; ValueError if it is none of this project's."""
    if data.get("type") != "char" or not isinstance(data.get("characters"), str):
        raise ValueError(f"unknown tokenizer {str(data)[:80]}")
    return CharTokenizer(data["characters"])
