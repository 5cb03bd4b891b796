"""The prefix index: what each full slab holds, as a tree from a salt's root down the token ids.

A node is found by the chained SHA-256 over (salt, identity, T, mask id, token ids), but is taken only if its parent
*is* the node found before, and its mask and token ids are equal. So no hit rests on the hash: a collision is only a
miss, whatever the digest's length (a test sets it to 8 bits). This needs the nodes above a slab even when their own
slabs are evicted; such *ghosts* stay while something is below them, and their number is bounded.
"""

from __future__ import annotations

from hashlib import sha256

from ..common.counters import Counters
from ..common.kv import OWNER_BYTES
from .messages import FULL_MASK, TOKEN

HASH_BITS = 256


class Node:
    """Contents of one full slab: its tokens behind all those of its ancestors, computed with its mask."""

    __slots__ = ("copies", "hash", "indexed", "mask", "parent", "refs", "slab", "tokens", "uid")

    def __init__(self, uid: int, parent: Node | None, mask: bytes, tokens: bytes, digest: bytes, indexed: bool) -> None:
        self.uid = uid  # never used again; grows, so that a parent's is less than its child's
        self.parent = parent  # None: a root, or not indexed
        self.mask, self.tokens, self.hash, self.indexed = mask, tokens, digest, indexed
        self.slab: int | None = None  # where an attach finds it
        self.copies: tuple[int, ...] = ()  # slabs that others filled with the same; held, so never cached
        self.refs = 0  # children, slabs with these contents, sequences whose end this is


class PrefixIndex:
    """identity: whatever else decides a slab's bits: model id, fingerprint, KV format."""

    def __init__(self, identity: bytes, slab_tokens: int, hash_bits: int, most_ghosts: int, counters: Counters) -> None:
        self._step, self._cut_at, self._most_ghosts = slab_tokens * TOKEN, hash_bits // 8, most_ghosts
        self._prefix = sha256(identity + slab_tokens.to_bytes(4, "little")).digest()
        self._counters = counters
        self._roots: dict[bytes, Node] = {}  # by their whole digest: two salts never meet, even in the test above
        self._nodes: dict[bytes, Node] = {}
        self._ghosts: dict[Node, None] = {}  # oldest first
        self._owners: dict[Node, bytes] = {}  # of roots whose salt was named since they were made or restored
        self._next_uid = 1

    # ---- finding -----------------------------------------------------------------------------------------------------

    def walk(self, salt: bytes, tokens: bytes, count: int, full: int, mask: bytes) -> list[Node]:
        """The salt's root and the nodes of the first ``count`` slabs of tokens, as far as they are known; empty if not
        even the root is. The first ``full`` slabs have the full mask, the others ``mask``."""
        node = self._roots.get(self._root_digest(salt))
        if node is None:
            return []
        path = [node]
        nodes, step, cut = self._nodes, self._step, self._cut_at
        full_bytes = full * step
        for at in range(0, count * step, step):
            chunk = tokens[at : at + step]
            slab_mask = FULL_MASK if at < full_bytes else mask
            child = nodes.get(sha256(node.hash + slab_mask + chunk).digest()[:cut])
            if child is None:
                break
            if child.parent is not node or child.tokens != chunk or child.mask != slab_mask:
                self._reject(child)
                break
            path.append(child)
            node = child
        return path

    def root(self, salt: bytes) -> Node:
        """To be held by the caller."""
        root = self._root_of(self._root_digest(salt))
        self._owners[root] = salt[:OWNER_BYTES]
        return root

    def cut_roots(self, owner: bytes | None) -> None:
        """Nothing is found any more under salts that begin with owner, or might; None: under any."""
        for root in list(self._roots.values()):
            if owner is None or self._owners.get(root, owner) == owner:
                self.cut(root)

    def is_lost(self, node: Node) -> bool:
        """Whether it, or something above it, was cut out of the tree."""
        up: Node | None = node
        while up is not None and up.indexed:
            up = up.parent
        return up is not None

    def is_below(self, node: Node, root: Node) -> bool:
        up: Node | None = node
        while up is not None and up is not root:
            up = up.parent
        return up is root

    def _root_digest(self, salt: bytes) -> bytes:
        return sha256(self._prefix + salt).digest()

    def _root_of(self, digest: bytes) -> Node:
        root = self._roots.get(digest)
        if root is None:
            root = self._roots[digest] = Node(0, None, FULL_MASK, b"", digest, True)
        return root

    def _hash(self, parent: Node, mask: bytes, tokens: bytes) -> bytes:
        return sha256(parent.hash + mask + tokens).digest()[: self._cut_at]

    def _reject(self, found: Node) -> None:
        reason = "stale" if _is_stale(found) else "token_mismatch"
        self._counters.add("prefix_cache_rejects_total", reason=reason)

    # ---- growing -----------------------------------------------------------------------------------------------------

    def child(self, parent: Node | None, mask: bytes, tokens: bytes) -> tuple[Node, int | None]:
        """The node of a slab behind parent; not indexed if parent is not, or if its hash is taken. To be held by the
        caller. Second: the slab of a node that nothing could find any more and that gave way."""
        if parent is None or not parent.indexed:
            return self._unindexed(self._take_uid(), mask, tokens), None
        digest, displaced = self._hash(parent, mask, tokens), None
        found = self._nodes.get(digest)
        if found is not None:
            if found.parent is parent and found.tokens == tokens and found.mask == mask:
                return found, None
            self._reject(found)
            if not _is_stale(found):
                return self._unindexed(self._take_uid(), mask, tokens), None
            displaced = found.slab
            self.cut(found)
        return self._indexed(self._take_uid(), parent, mask, tokens, digest), displaced

    def restored(self, uid: int, parent: Node | None, mask: bytes, tokens: bytes, digest: bytes) -> Node:
        """A node from the journal; not indexed if its place in the tree cannot be proved. To be held by the caller."""
        self._next_uid = max(self._next_uid, uid + 1)
        digest = digest[: self._cut_at]
        if parent is None or not parent.indexed or self._hash(parent, mask, tokens) != digest or digest in self._nodes:
            return self._unindexed(uid, mask, tokens)
        return self._indexed(uid, parent, mask, tokens, digest)

    def restored_root(self, digest: bytes) -> Node:
        return self._root_of(digest)

    def _indexed(self, uid: int, parent: Node, mask: bytes, tokens: bytes, digest: bytes) -> Node:
        parent.refs += 1
        node = self._nodes[digest] = Node(uid, parent, mask, tokens, digest, True)
        return node

    def _unindexed(self, uid: int, mask: bytes, tokens: bytes) -> Node:
        return Node(uid, None, mask, tokens, b"", False)

    def _take_uid(self) -> int:
        self._next_uid += 1
        return self._next_uid - 1

    # ---- holding -----------------------------------------------------------------------------------------------------

    def hold(self, node: Node) -> None:
        node.refs += 1

    def drop(self, node: Node | None) -> None:
        """Gives a hold back. A node that nothing needs goes, and so may those above it."""
        while node is not None:
            node.refs -= 1
            if node.refs:
                return
            above, node.parent = node.parent, None
            if node.indexed:
                self._unlist(node)
            node = above

    def fill(self, node: Node, slab: int) -> None:
        """The slab has these contents; takes a hold."""
        self.hold(node)
        if node.slab is None:
            node.slab = slab
            self._ghosts.pop(node, None)
        else:
            node.copies += (slab,)

    def vacate(self, node: Node, slab: int) -> None:
        """The slab does not hold these contents any more; gives its hold back. If there are too many ghosts now, the
        oldest is cut out of the tree: what is below it can no longer be found, and is evicted in its turn."""
        if node.slab != slab:
            node.copies = tuple(copy for copy in node.copies if copy != slab)
        else:
            node.slab, node.copies = (node.copies or (None,))[0], node.copies[1:]
            if node.slab is None and node.indexed and node.refs > 1:
                self._ghosts[node] = None
        self.drop(node)
        if len(self._ghosts) > self._most_ghosts:
            self.cut(next(iter(self._ghosts)))

    def cut(self, node: Node) -> None:
        """Takes the node out of the tree: it, and what is below it, can no longer be found."""
        self._unlist(node)
        above, node.parent = node.parent, None
        self.drop(above)

    def _unlist(self, node: Node) -> None:
        node.indexed = False
        self._ghosts.pop(node, None)
        self._owners.pop(node, None)
        if self._nodes.get(node.hash) is node:
            del self._nodes[node.hash]
        elif self._roots.get(node.hash) is node:
            del self._roots[node.hash]

    # ---- for check() and tests ---------------------------------------------------------------------------------------

    @property
    def nodes(self) -> list[Node]:
        return [*self._roots.values(), *self._nodes.values()]

    @property
    def ghosts(self) -> set[Node]:
        return set(self._ghosts)


def _is_stale(node: Node) -> bool:
    """In the table, but not to be reached from a root any more."""
    return node.parent is not None and not node.parent.indexed
