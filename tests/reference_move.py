"""A plan carried out by nothing but nested loops, conversions by ml_dtypes: slow, and plainly what the seams say."""

from itertools import product

import numpy as np
from number_cases import NUMPY, bits_of, expected


def reference_move(plan, sources, targets):
    """Move a plan's elements from ``sources`` to ``targets``, arrays of bytes by region id."""
    for segment in plan.segments:
        for base, (source_region, source_base, target_region, target_base) in enumerate(segment.bases.tolist()):
            for source_piece, target_piece in segment.pieces.tolist():
                for index in product(*(range(dim.count) for dim in segment.nest)):
                    source = source_base + source_piece
                    target = target_base + target_piece
                    for step, dim in zip(index, segment.nest, strict=True):
                        source += step * dim.source_stride
                        target += step * dim.target_stride
                    run = sources[source_region][source : source + segment.run_bytes]
                    if segment.convert is not None:
                        run = converted(run, segment.convert, base, index)
                    targets[target_region][target : target + len(run)] = run


def converted(run, convert, base, index):
    column = 0 if convert.scale_dim < 0 else index[convert.scale_dim]
    scales = [None if s is None else s[base, column] for s in (convert.source_scales, convert.target_scales)]
    stored = np.frombuffer(run.tobytes(), NUMPY[convert.source])
    return bits_of(expected(stored, convert.target, *scales)).view(np.uint8)
