"""Engines of any shape the field uses, drawn by a seeded generator: what both sides hold, and one request of it.

A rank's cache is made of *columns* (a kind, or some of its channels) laid out in any order of the axes layer, column,
block, slot, head and channel, each padded at will; the common orders are among them by name.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace

import numpy as np

from kvlink.layout import (
    CacheSpec,
    DType,
    Group,
    GroupShare,
    Identity,
    IndexedBy,
    Place,
    Plane,
    PlaneKind,
    RankShare,
    Row,
    check_spec,
    heads_of_rank,
    layers_of_stage,
)

HEADS = (1, 2, 4, 6, 8, 16, 64)
BLOCKS = (1, 5, 16, 32, 48, 64, 128)
RANKS = (1, 2, 3, 4, 8)
K = PlaneKind
FLOATS = (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32)
QUANTISED = (DType.FLOAT8_E4M3, DType.FLOAT8_E5M2, DType.INT8)
NAMED_ORDERS = {
    "nhd": "layer | column block slot head channel",
    "hnd": "layer | block column head slot channel",
    "fused": "layer | block head slot column channel",
    "apart": "column layer | block slot head channel",
    "first": "| column block layer slot head channel",
    "blockmajor": "| block layer column slot head channel",
}
"""Axes before the bar choose the region; the others lie in it, outermost first."""
AXES = ("layer", "column", "block", "slot", "head", "channel")


@dataclass(frozen=True)
class Model:
    """One group as both sides know it: its kinds, heads, and how entries of its block lists are meant."""

    name: str
    kinds: tuple[PlaneKind, ...]
    channels: dict[PlaneKind, int]
    num_heads: int
    indexed_by: IndexedBy = IndexedBy.TOKEN
    slots: int | None = None
    """Slots of an entry; drawn a side where entries are tokens."""
    layers: tuple[int, ...] | None = None
    """The same on every stage; by default the stage's."""
    window: int | None = None
    every: tuple[int, int] | None = None
    """Only layers of this remainder: a stage may hold none."""


@dataclass(frozen=True)
class Side:
    """How one engine stores one group."""

    order: str
    block_size: int
    ratio: int
    num_blocks: int
    dtypes: dict[PlaneKind, DType]
    cuts: dict[PlaneKind, tuple[int, ...]]
    """First channels of the planes of a kind."""
    shuffle: int | None
    pads: dict[str, int]
    scale_shape: tuple[bool, bool]
    """Whether scales differ by plane, by head."""
    scale_seed: int
    aliases: str | None = None
    """The group whose memory this one shares."""


@dataclass
class Engine:
    """One engine: specs of its ranks are built when asked for."""

    name: str
    tp: int
    pp: int
    num_layers: int
    identity: Identity
    groups: list[tuple[Model, Side]]
    _specs: dict[tuple[int, int], CacheSpec] = field(default_factory=dict)

    def shares(self) -> list[RankShare]:
        return [self.share(pp, tp) for pp in range(self.pp) for tp in range(self.tp)]

    def share(self, pp, tp) -> RankShare:
        groups = tuple(
            GroupShare(name=m.name, layers=self.layers_of(m, pp), heads=heads_of_rank(m.num_heads, self.tp, tp))
            for m, _ in self.groups
        )
        return RankShare(pp_rank=pp, tp_rank=tp, groups=groups)

    def layers_of(self, model, pp):
        layers = model.layers or layers_of_stage(self.num_layers, self.pp, pp)
        return tuple(n for n in layers if model.every is None or n % model.every[0] == model.every[1])

    def spec(self, pp, tp) -> CacheSpec:
        if (pp, tp) not in self._specs:
            self._specs[pp, tp] = self._build(pp, tp)
        return self._specs[pp, tp]

    def _build(self, pp, tp):
        groups, lengths, starts = [], [], {}
        for model, side in self.groups:
            heads = list(heads_of_rank(model.num_heads, self.tp, tp))
            if side.shuffle is not None:
                random.Random(side.shuffle).shuffle(heads)
            first_region = len(lengths) if side.aliases is None else starts[side.aliases]
            starts[model.name] = first_region
            planes, own = planes_of(model, side, self.layers_of(model, pp), len(heads), first_region)
            if side.aliases is None:
                lengths += own
            groups.append(group_of(model, side, heads, planes))
        spec = CacheSpec(
            identity=self.identity,
            place=Place(engine=self.name, incarnation="1", pp_rank=pp, pp_size=self.pp, tp_rank=tp, tp_size=self.tp),
            groups=tuple(groups),
            region_bytes=tuple(lengths),
        )
        check_spec(spec)
        return spec


def columns_of(model, side):
    """(kind, first channel, channels) of each plane of a layer."""
    return [
        (kind, first, last - first)
        for kind in model.kinds
        for first, last in itertools.pairwise((*side.cuts[kind], model.channels[kind]))
    ]


def planes_of(model, side, layers, heads, first_region):
    """Planes of one rank and the lengths of the regions they need."""
    if not layers:
        return [], []
    outside, inside = (part.split() for part in side.order.split("|"))
    columns = columns_of(model, side)
    counts = {"block": side.num_blocks * side.ratio, "slot": side.block_size // side.ratio, "head": heads}
    planes, lengths = [], []
    apart = list(itertools.product(*({"layer": layers, "column": columns}[axis] for axis in outside)))
    for region, chosen in enumerate(apart, start=first_region):
        fixed = dict(zip(outside, chosen, strict=True))
        mine = [fixed["column"]] if "column" in fixed else columns
        its_layers = [fixed["layer"]] if "layer" in fixed else layers
        strides, offsets, layer_step, length = measure(model, side, inside, mine, len(its_layers), counts)
        lengths.append(side.pads["start"] + length)
        for index, layer in enumerate(its_layers):
            for column in mine:
                kind, first, channels = column
                step = strides[column]
                planes.append(
                    Plane(
                        layer=layer, kind=kind, region=region,
                        offset_bytes=side.pads["start"] + index * layer_step[column] + offsets[column],
                        block_stride=step["block"], slot_stride=step["slot"], head_stride=step["head"],
                        channel_stride=step["channel"], first_channel=first, channels=channels,
                    )
                )  # fmt: skip
    return planes, lengths


def measure(model, side, inside, columns, num_layers, counts):
    """Strides by column and axis, offset of each column, step from layer to layer, and bytes in all.

    From the innermost axis out, each column has a size of its own until the column axis lays them side by side.
    """
    size = {column: side.dtypes[column[0]].itemsize for column in columns}
    strides = {column: {} for column in columns}
    offsets = dict.fromkeys(columns, 0)
    layer_step = dict.fromkeys(columns, 0)
    laid = False
    for axis in reversed(inside):
        if axis == "column":
            at, laid = 0, True
            for column in columns:
                offsets[column], at = at, at + size[column] + side.pads["column"]
            size = dict.fromkeys(columns, at)
            continue
        for column in columns:
            count = {"layer": num_layers, "channel": column[2], **counts}[axis]
            if axis == "layer":
                layer_step[column] = size[column]
            else:
                strides[column][axis] = size[column]
            pad = side.pads.get(axis, 0)
            size[column] = size[column] * count + pad
        if laid:  # a column with fewer channels leaves the others' steps as they are
            size = dict.fromkeys(columns, max(size.values()))
    return strides, offsets, layer_step, max(size.values())


def group_of(model, side, heads, planes):
    main = model.kinds[0]
    others = tuple(
        Row(kind, model.channels[kind], side.dtypes[kind])
        for kind in model.kinds
        if (model.channels[kind], side.dtypes[kind]) != (model.channels[main], side.dtypes[main])
    )
    return Group(
        name=model.name,
        heads=tuple(heads),
        channels=model.channels[main],
        dtype=side.dtypes[main],
        block_size=side.block_size,
        num_blocks=side.num_blocks,
        planes=tuple(planes),
        indexed_by=model.indexed_by,
        ratio=side.ratio,
        num_heads=model.num_heads,
        window=model.window,
        rows=others,
        scales=scales_of(model, side, heads, planes),
    )


def scales_of(model, side, heads, planes):
    """Scales by global layer, kind, channel and head, so that two ranks of one engine agree on a head's."""
    if not planes or not any(side.dtypes[kind].quantised for kind in model.kinds):
        return ()
    by_plane, by_head = side.scale_shape

    def scale(plane, head):
        where = (plane.layer, str(plane.kind), plane.first_channel) if by_plane else ()
        draw = random.Random(repr((side.scale_seed, where, head if by_head else None)))
        return float(np.float32(draw.choice((0.5, 1.0, 0.3, 1.7))))

    return tuple(
        tuple(scale(plane, head) for head in (heads if by_head else heads[:1]))
        for plane in (planes if by_plane else planes[:1])
    )


@dataclass
class Request:
    """Block lists of both engines, one a group, and where positions begin."""

    tokens: int
    starts: list[int]
    source_blocks: list[list[int]]
    target_blocks: list[list[int]]


@dataclass
class Case:
    """A pair of engines and a request between them."""

    seed: int
    source: Engine
    target: Engine
    request: Request


def draw_case(seed: int) -> Case:
    """One case; the same for a seed, everywhere."""
    draw = random.Random(seed)
    pps = draw.choice(RANKS), draw.choice(RANKS)
    tps = draw.choice(RANKS), draw.choice(RANKS)
    num_layers = max(pps) + draw.randrange(3)
    models = draw_models(draw)
    identity = Identity(model="zoo", num_layers=num_layers, num_kv_heads=models[0].num_heads, head_dim=4)
    tokens = draw.choice((1, 7, 33, 64, 65, 129, 200)) if draw.random() < 0.7 else draw.randrange(1, 260)
    sides = [draw_sides(draw, model, tokens) for model in models]
    alias_some(draw, models, sides)
    interleave_some(draw, models, sides, num_layers)
    engines = [
        Engine(name, tp, pp, num_layers, identity, list(zip(models, (pair[index] for pair in sides), strict=True)))
        for index, (name, tp, pp) in enumerate(zip("pd", tps, pps, strict=True))
    ]
    first = draw.choice((0, 0, draw.randrange(tokens + 1)))
    starts = [max(first, draw.randrange(tokens + 1)) if m.window is not None else first for m in models]
    entries = draw.randrange(4)
    blocks = [draw_blocks(draw, engine, starts, tokens, entries) for engine in engines]
    return Case(seed, *engines, Request(tokens, starts, *blocks))


def draw_models(draw):
    """One to three groups of a model, such as a hybrid has."""
    full = draw.choice(HEADS)
    makers = {
        "full": lambda: kv("full", full, draw.choice((1, 2, 4))),
        "swa": lambda: replace(kv("swa", draw.choice(HEADS), draw.choice((1, 2))), window=32),
        "mla": lambda: mla(draw),
        "index": lambda: plain("index", {K.INDEX: draw.choice((2, 8))}),
        "index8": lambda: plain("index8", {K.INDEX: 8, K.INDEX_SCALE: 1}),
        "conv": lambda: entry("conv", K.CONV, draw.choice((6, 8, 16)), channels=2, slots=draw.choice((1, 3))),
        "ssm": lambda: entry("ssm", K.SSM, draw.choice((6, 8, 64)), channels=draw.choice((1, 4)), slots=1),
        "row": lambda: replace(entry("row", K.ROW, 1, channels=draw.choice((1, 24)), slots=1), layers=(0,)),
    }
    names = draw.sample(sorted(makers), draw.choice((1, 1, 2, 3)))
    if draw.random() < 0.3:
        names = draw.choice((["full"], ["full", "swa"], ["swa", "full", "conv"]))
    return [makers[name]() for name in names]


def kv(name, heads, channels):
    return Model(name, (K.K, K.V), {K.K: channels, K.V: channels}, heads)


def plain(name, channels):
    return Model(name, tuple(channels), channels, 1)


def entry(name, kind, heads, *, channels, slots):
    return Model(name, (kind,), {kind: channels}, heads, indexed_by=IndexedBy.ENTRY, slots=slots)


def mla(draw):
    """One latent of 6, with rotary channels in it or beside it, or of another dtype under inline scales."""
    return plain(
        "mla", draw.choice(({K.LATENT: 6}, {K.LATENT: 4, K.ROPE: 2}, {K.LATENT: 4, K.LATENT_SCALE: 1, K.ROPE: 2}))
    )


def draw_sides(draw, model, tokens):
    """Both engines' ways to store a group: of dtypes that can be moved or converted."""
    dtypes = draw_dtypes(draw, model)
    return [draw_side(draw, model, tokens, dtypes[index]) for index in (0, 1)]


def draw_dtypes(draw, model):
    inline = {kind.scaled for kind in model.kinds} - {None}
    pairs = {}
    for kind in model.kinds:
        if kind is K.ROW:
            pair = (DType.OPAQUE, DType.OPAQUE)
        elif kind.scaled is not None:
            pair = (DType.FLOAT32, DType.FLOAT32)
        elif kind in inline:
            pair = (draw.choice(QUANTISED),) * 2
        elif draw.random() < 0.6:
            pair = (draw.choice(FLOATS + QUANTISED[:1]),) * 2
        else:
            pair = draw.choice(FLOATS + QUANTISED), draw.choice(FLOATS + QUANTISED)
        pairs[kind] = pair
    if model.kinds == (K.K, K.V) and draw.random() < 0.8:
        pairs[K.V] = pairs[K.K]
    return [{kind: pair[index] for kind, pair in pairs.items()} for index in (0, 1)]


def draw_side(draw, model, tokens, dtypes):
    block_size = model.slots or draw.choice(BLOCKS)
    ratio = draw.choice([r for r in (1, 1, 2, 4) if block_size % r == 0])
    if draw.random() < 0.7:
        order = draw.choice(sorted(NAMED_ORDERS.values()))
    else:
        axes = draw.sample(AXES, len(AXES))
        outside = draw.choice(((), ("layer",), ("column", "layer")))
        order = " ".join([*outside, "|", *(axis for axis in axes if axis not in outside)])
    cuts = {
        kind: (0, draw.randrange(1, model.channels[kind])) if model.channels[kind] > 1 and draw.random() < 0.3 else (0,)
        for kind in model.kinds
    }
    item = max(dtype.itemsize for dtype in dtypes.values())
    pads = {axis: draw.choice((0, 0, 0, item, 3 * item)) for axis in (*AXES, "start")}
    entries = 6 if model.indexed_by is IndexedBy.ENTRY else -(-tokens // block_size)
    return Side(
        order=order,
        block_size=block_size,
        ratio=ratio,
        num_blocks=entries + 2 + draw.randrange(3),
        dtypes=dtypes,
        cuts=cuts,
        shuffle=draw.randrange(1000) if draw.random() < 0.2 else None,
        pads=pads,
        scale_shape=(draw.random() < 0.5, draw.random() < 0.5),
        scale_seed=draw.randrange(3),
    )


def alias_some(draw, models, sides):
    """Let two groups of equal shape share memory on either side, as hybrid models' groups do."""
    at = [index for index, model in enumerate(models) if model.kinds == (K.K, K.V)]
    if len(at) == 2 and draw.random() < 0.6:
        one, other = at
        models[other] = replace(models[other], channels=models[one].channels, num_heads=models[one].num_heads)
        for index in (0, 1):
            both = replace(sides[one][index], num_blocks=2 * sides[one][index].num_blocks)
            sides[one][index] = both
            sides[other][index] = replace(both, aliases=models[one].name)


def interleave_some(draw, models, sides, num_layers):
    """Let layers belong to one group or another, as hybrid models' do; the first group has all, for simplicity."""
    for index in range(1, len(models)):
        shares = any(side.aliases for pair in sides for side in pair)
        if models[index].layers is None and not shares and draw.random() < 0.5:
            models[index] = replace(models[index], every=(2, draw.randrange(min(2, num_layers))))


def draw_blocks(draw, engine, starts, tokens, entries):
    """Distinct blocks in any order, never block 0; the null block 0 where nothing of a group is left."""
    free = {}
    lists = []
    for (model, side), first in zip(engine.groups, starts, strict=True):
        pool = side.aliases or model.name
        ids = free.setdefault(pool, draw.sample(range(1, side.num_blocks), side.num_blocks - 1))
        if model.indexed_by is IndexedBy.ENTRY:
            lists.append([ids.pop() for _ in range(entries)])
        else:
            count, nulls = -(-tokens // side.block_size), first // side.block_size
            lists.append([0 if index < nulls else ids.pop() for index in range(count)])
    return lists
