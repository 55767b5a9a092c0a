"""`from mooncake.engine import TransferEngine`."""

from mooncake_backend.membership import not_yet

TransferEngine = not_yet("TransferEngine", "the public face of the transfer engine")
