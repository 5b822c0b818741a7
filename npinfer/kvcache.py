"""The KV cache: keys and values of the tokens seen so far, in every layer.

Append is the only way rows come in, and the cache says which of them a query
may still see: all of them, or under a sliding window W the W - 1 before the
new ones.  A row that no later query can see is not held (it may still lie in
the buffer, but it is not counted and not given back).
"""

import operator

import numpy as np

from npinfer.checks import whole
from npinfer.errors import CacheError, ShapeError
from npinfer.formats import held

GROWTH_ROWS = 256  # without a declared capacity, buffers grow by at least this


class _Layer:
    """Rows of one layer: `stop` positions were appended, buffer row 0 is position `base`."""

    __slots__ = ("window", "stop", "base", "buffer", "keep")

    def __init__(self, window):
        self.window, self.stop, self.base, self.buffer = window, 0, 0, None
        self.keep = None  # position from which on no row may be let go of, whatever the window

    @property
    def held(self):
        """Rows that a later query can still see."""
        return self.stop if self.window is None else min(self.stop, self.window - 1)

    def write(self, parts, limit):
        """Append rows (K and V, or a latent) and return views of all that the new queries may see."""
        n_new, held = parts[0].shape[2], self.held
        if self.buffer is None or self.stop + n_new - self.base > self.buffer.shape[3]:
            self._make_room(self.n_kept(self.stop), parts, limit)
        start, stop = self.stop - self.base, self.stop - self.base + n_new
        visible = []
        for buffer, rows in zip(self.buffer, parts):
            buffer[:, :, start:stop] = rows
            visible.append(buffer[:, :, start - held : stop])
        self.stop += n_new
        return visible

    def _make_room(self, held, parts, limit):
        """Move the held rows to the front, of a larger buffer if they would fill more than half of this one."""
        batch, n_heads, n_new, width = parts[0].shape
        first = self.stop - held
        old = None if self.buffer is None else self.buffer[:, :, :, first - self.base : self.stop - self.base]
        size = 0 if old is None else self.buffer.shape[3]
        if held + n_new > size or (self.window is not None and 2 * held > size):
            if limit is not None and self.window is None:
                size = limit
            else:  # twice a window lets W - 1 steps pass between two moves
                size = held + n_new + max(GROWTH_ROWS, held // 2 if self.window is None else self.window)
                size = size if limit is None else min(size, max(limit, held + n_new))
            self.buffer = np.empty((len(parts), batch, n_heads, size, width), np.float32)
        if held:
            self.buffer[:, :, :, :held] = old
        self.base = first

    def n_kept(self, stop):
        """Rows to keep of `stop` positions: those that a later query can see, and those asked for."""
        held = stop if self.window is None else min(stop, self.window - 1)
        return held if self.keep is None else max(held, stop - self.keep)

    def restore(self, parts, stop, buffer):
        """Fill an empty layer from arrays (parts, n_heads, n, width), end to end `stop` rows; takes those to keep."""
        kept = missing = self.n_kept(stop)
        self.buffer, self.base, self.stop = buffer, stop - kept, stop
        taken = []
        for part in reversed(parts):
            if missing > 0:
                taken.append(part[:, :, -missing:])
                missing -= part.shape[2]
        if taken:
            np.concatenate(taken[::-1], axis=2, out=buffer[:, 0, :, :kept])

    def copy(self):
        """A layer of the same rows that shares nothing with this one."""
        other = _Layer(self.window)
        other.stop, other.base = self.stop, self.stop - self.held
        if self.buffer is not None:
            other.buffer = self.buffer[:, :, :, other.base - self.base : self.stop - self.base].copy()
        return other


class KVCache:
    """Keys and values of a batch of sequences of equal length; make one with `model.new_cache`.

    Parameters
    ----------
    config : ModelConfig
    format_ : Format
        Storage format: values are rounded to it when they are appended, and
        bytes are counted in it.  The arrays themselves are float32; rows of
        int8 are codes, with their scale as one more column.
    batch : int
    capacity : int, optional
        Positions it can take, windows included; buffers are made once.
        Without it the cache grows in steps.
    numeric : bool
        Whether rows have values.
    weights : Weights, optional
        Of the model that it belongs to; another model's rows mean nothing to it.

    Attributes
    ----------
    length : int
        Positions appended so far, in every layer.
    width : int
        Columns of a row: those of `config.kv_shape`, and the scale of an int8 cache.
    nbytes : int
        Stored bytes of the rows held (not of the capacity).
    """

    def __init__(self, config, format_, batch=1, capacity=None, numeric=True, weights=None):
        self.config, self.format, self.numeric, self.weights = config, format_, numeric, weights
        self.batch = whole("batch", batch)
        self.capacity = None if capacity is None else whole("capacity", capacity)
        self._n_parts, _, width = config.kv_shape
        self._pieces = config.kv_pieces
        self.width = width + (format_.group is not None)
        self._layers = [_Layer(window) for window in config.windows]

    @property
    def length(self):
        return min(layer.stop for layer in self._layers)

    @property
    def nbytes(self):
        n_parts, n_heads, width = self.config.kv_shape
        row = n_parts * self.format.nbytes((self.batch, n_heads, width))
        return row * sum(layer.held for layer in self._layers)

    def n_visible(self, layer):
        """Rows of `layer` that the next query sees before its own."""
        return self._layers[layer].held

    def check_even(self):
        """Raise `CacheError` if some layers have more positions than others."""
        lengths = sorted({layer.stop for layer in self._layers})
        if len(lengths) > 1:
            raise CacheError(f"layers of the cache have {lengths} positions, expected the same in all; crop to {lengths[0]}")

    def check_room(self, n_new):
        """Raise `CacheError` if `n_new` more positions do not fit."""
        held = max(layer.stop for layer in self._layers)
        if self.capacity is not None and held + n_new > self.capacity:
            raise CacheError(
                f"the cache holds {held} of capacity {self.capacity} positions, {n_new} more do not fit; "
                "make one with a larger capacity, or with none to let it grow"
            )

    def append(self, layers, k, v):
        """Write new rows at the end of a layer; this is what `ops.kv_append` does.

        Parameters
        ----------
        layers : int or range
            Several layers only without values.
        k, v : array of shape (batch, n_kv_heads, n_new, head_dim)
            Of a latent, the two pieces (batch, 1, n_new, ...) of its row.

        Returns
        -------
        list of float32 arrays (batch, n_kv_heads, n_visible, width)
            Keys and values, or latent rows alone: views of all rows that the
            new queries may see, the new ones last; None each without values.

        Raises
        ------
        ShapeError
            If `k` or `v` has another shape.
        CacheError
            If there is no room, or no such layer; nothing is written.
        """
        layers = layers if layers.__class__ is range else (operator.index(layers),)
        n_new = k.shape[2] if len(k.shape) == 4 else "n_new"
        (k_heads, k_width), (v_heads, v_width) = self._pieces
        expected = (self.batch, k_heads, n_new, k_width), (self.batch, v_heads, n_new, v_width)
        if (k.shape, v.shape) != expected:
            raise ShapeError(f"append: k is {k.shape} and v is {v.shape}, expected {' and '.join(map(str, expected))}")
        if not 0 <= layers[0] <= layers[-1] < len(self._layers) or (self.numeric and len(layers) > 1):
            met = layers[0] if len(layers) == 1 else layers
            raise CacheError(f"append: no layer {met}; the model has layers 0 to {len(self._layers) - 1}")
        if self.capacity is not None and self._layers[layers[0]].stop + n_new > self.capacity:
            self.check_room(n_new)
        if self.numeric:
            parts = (k, v) if self._n_parts == 2 else (np.concatenate((k, v), axis=-1),)
            if self.format != "fp32":
                parts = [held(np.asarray(rows, np.float32), self.format) for rows in parts]
            return self._layers[layers[0]].write(parts, self.capacity)
        for layer in layers:
            self._layers[layer].stop += n_new
        return [None] * self._n_parts

    def crop(self, length):
        """Forget all positions from `length` on.

        Raises
        ------
        CacheError
            If `length` is more than there is, or if a window has let go of a
            row that the position `length` would see; `crop(0)` always works.
        """
        length = whole("length", length, least=0)
        if length > self.length:
            raise CacheError(f"crop: cannot keep {length} positions of {self.length}")
        for number, layer in enumerate(self._layers):
            first_held, first_needed = layer.stop - layer.held, max(0, length + 1 - (layer.window or length + 1))
            if first_needed < min(first_held, length):
                raise CacheError(
                    f"crop: layer {number} has a window of {layer.window} and holds positions from {first_held} on; "
                    f"cropped to {length} it would need those from {first_needed}; crop to 0 and prefill again"
                )
        self.rollback(length)

    def rollback(self, length):
        """Undo appends made since the cache had `length` positions, as after a forward that failed."""
        for layer in self._layers:
            layer.stop = min(layer.stop, length)
            layer.base = min(layer.base, length)

    def keep_rows(self, position=None):
        """Let go of no row from `position` on, whatever the windows, until called again without one.

        They are not counted as held; it is for who wants to copy them out.
        """
        for layer in self._layers:
            layer.keep = position

    def rows(self, start, stop):
        """Rows of positions start to stop - 1 of a single sequence, in every layer.

        Returns
        -------
        float32 array (n_layers, parts, n_heads, stop - start, width), read-only
            A copy; None without values.
        """
        if not self.numeric:
            return None
        rows = np.stack([layer.buffer[:, 0, :, start - layer.base : stop - layer.base] for layer in self._layers])
        rows.flags.writeable = False
        return rows

    def restore(self, parts, length):
        """Fill an empty cache of one sequence with `length` positions from arrays as `rows` gives them.

        Parameters
        ----------
        parts : list of arrays (n_layers, parts, n_heads, n, width)
            Consecutive positions from 0 on; not looked at without values.
        """
        if not self.numeric:
            for layer in self._layers:
                layer.stop = length
            return
        n_parts, n_heads, _ = self.config.kv_shape
        shape = n_parts, self.batch, n_heads, -1, self.width
        row = n_parts * self.batch * n_heads * self.width
        sizes = [layer.n_kept(length) + GROWTH_ROWS for layer in self._layers]
        # One piece of memory for all layers: it comes in large pages, where many small pieces fault page by page.
        memory, at = np.empty(row * sum(sizes), np.float32), 0
        for number, (layer, size) in enumerate(zip(self._layers, sizes)):
            buffer = memory[row * at : row * (at + size)].reshape(shape)
            layer.restore([part[number] for part in parts], length, buffer)
            at += size

    def fork(self):
        """A cache of the same rows; neither sees what the other appends."""
        other = KVCache(self.config, self.format, self.batch, self.capacity, self.numeric, self.weights)
        other._layers = [layer.copy() for layer in self._layers]
        return other
