"""Walk LMCache's multi-process connector with `kvsm conform`, without a GPU.

    pip install --no-deps lmcache==0.5.6
    PYTHONPATH=specs kvsm conform lmcache_walk.connector:SharedMemory

`connector.py` starts a server of LMCache, and says what simulates the device.
"""
