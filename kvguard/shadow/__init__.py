"""Shadow probes: is the quantized KV cache changing the answers of these requests, by more than noise?"""
