"""The modules that programs import from deep_ep.buffers."""
