"""One wire: how any two tasks connect, prove who they are, and send each other bytes.

Here live addresses and ports, who listens and who calls, the handshake by the job's secret, TLS,
and how messages are framed, with every limit. Nothing here knows what a message means, who is in
the job, or torch.
"""
