"""From other formats to packs; installed as `spmoe_lite.converters`."""
