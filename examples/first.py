import torch

import massieu

query, key, value = torch.randn(3, 8, 256, 64, generator=torch.Generator().manual_seed(0))
output, rows = massieu.attend(query, key, value, causal=True)
print(f"entropy {rows.entropy.mean():.2f} nats, effective atoms {rows.effective_atoms.mean():.1f}")
