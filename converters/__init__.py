"""From other formats to packs; installed as `spmoe_lite.converters`."""

from spmoe_lite.converters.convert import convert
from spmoe_lite.converters.plan import ConvertPlan
from spmoe_lite.converters.repack import repack
from spmoe_lite.converters.writing import ConvertResult

__all__ = ["ConvertPlan", "ConvertResult", "convert", "repack"]
