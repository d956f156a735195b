"""From other formats to packs; installed as `spmoe_lite.converters`."""

from spmoe_lite.converters.plan import ConvertPlan
from spmoe_lite.converters.repack import ConvertResult, convert, repack

__all__ = ["ConvertPlan", "ConvertResult", "convert", "repack"]
