"""The blocks of an answer: runs of reasoning, of text, or the arguments of one call, in the order of generation.

`/v1/responses` calls them output items, `/v1/messages` content blocks. A stream tells when each begins, grows and ends;
a whole answer lists them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from hotset.serve.conversation import AnswerPiece, ReasoningPiece
from hotset.serve.tools.calls import CallArguments, CallBegins, CallBreaks, CallEnds, TextPiece, without_broken_calls


@dataclass(slots=True)
class Block:
    """One block. `text` grows until the block ends. `call` is set if the text is the arguments of a call, and
    `is_broken` if this call is malformed or cut off: its arguments are not JSON."""

    index: int
    kind: Literal["reasoning", "text", "call"]
    call: CallBegins | None = None
    text: str = ""
    is_broken: bool = False


@dataclass(frozen=True, slots=True)
class BlockChange:
    """What has happened to a block. `text` is the text that was added."""

    what: Literal["begins", "grows", "ends"]
    block: Block
    text: str = ""


@dataclass(slots=True)
class AnswerBlocks:
    """Divides the pieces of one answer into blocks. At most one block, the last one, is open."""

    blocks: list[Block] = field(default_factory=list)
    _is_open: bool = False

    def push(self, pieces: Iterable[AnswerPiece]) -> Iterator[BlockChange]:
        """Yields the changes that the pieces make."""
        for piece in pieces:
            if isinstance(piece, CallBegins):
                yield from self.end()
                yield self._begin(Block(len(self.blocks), "call", piece))
            elif isinstance(piece, CallEnds):
                yield from self.end()
            elif isinstance(piece, CallBreaks):
                self.blocks[-1].is_broken = True
                yield from self.end()
                yield from self.push([TextPiece(piece.unsent)])
            elif piece.text:
                if not self._continues(piece):
                    assert not isinstance(piece, CallArguments), "the arguments of a call follow its beginning"
                    yield from self.end()
                    kind: Literal["reasoning", "text"] = "reasoning" if isinstance(piece, ReasoningPiece) else "text"
                    yield self._begin(Block(len(self.blocks), kind))
                block = self.blocks[-1]
                block.text += piece.text
                yield BlockChange("grows", block, piece.text)

    def add(self, pieces: Iterable[AnswerPiece]) -> None:
        """Adds the pieces of a whole answer, in which broken calls are text."""
        for _ in self.push(without_broken_calls(pieces)):
            pass

    def text(self, kind: Literal["reasoning", "text"]) -> str:
        """Returns the texts of all blocks of a kind as one."""
        return "".join(block.text for block in self.blocks if block.kind == kind)

    def end(self) -> Iterator[BlockChange]:
        """Ends the open block, if there is one."""
        if self._is_open:
            self._is_open = False
            yield BlockChange("ends", self.blocks[-1])

    def _begin(self, block: Block) -> BlockChange:
        self.blocks.append(block)
        self._is_open = True
        return BlockChange("begins", block)

    def _continues(self, piece: ReasoningPiece | TextPiece | CallArguments) -> bool:
        """Returns whether the piece belongs to the open block."""
        if not self._is_open:
            return False
        block = self.blocks[-1]
        if isinstance(piece, CallArguments):
            return block.call is not None and block.call.index == piece.index
        return block.kind == ("reasoning" if isinstance(piece, ReasoningPiece) else "text")
