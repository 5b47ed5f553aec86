"""Front ends: everything that knows text. HTTP and RPC in, tokens out to engines, streams back. Never imports tensors."""
