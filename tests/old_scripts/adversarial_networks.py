import torch
from apex import amp
from torch import nn

amp.register_half_function(torch, "einsum")
amp.register_float_function(torch, "sigmoid")
D = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)).cuda()
G = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2)).cuda()
optimizerD = torch.optim.Adam(D.parameters(), lr=0.01, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(G.parameters(), lr=0.01, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
judge = amp.initialize(nn.Linear(2, 2).cuda(), opt_level="O0", verbosity=0)
assert judge(torch.einsum("ij->ij", torch.ones(1, 2).cuda())).shape == (1, 2)
[D, G], [optimizerD, optimizerG] = amp.initialize(
    [D, G], [optimizerD, optimizerG], opt_level="O1", num_losses=3, verbosity=0
)
real = torch.randn(32, 2).cuda() * 0.1 + 3
losses = []
for _ in range(60):
    fake = G(torch.randn(32, 3).cuda())
    D.zero_grad()
    errD_real = criterion(D(real), torch.ones(32, 1).cuda())
    with amp.scale_loss(errD_real, optimizerD, loss_id=0) as scaled:
        scaled.backward()
    errD_fake = criterion(D(fake.detach()), torch.zeros(32, 1).cuda())
    with amp.scale_loss(errD_fake, optimizerD, loss_id=1) as scaled:
        scaled.backward()
    optimizerD.step()
    G.zero_grad()
    errG = criterion(D(fake), torch.ones(32, 1).cuda())
    with amp.scale_loss(errG, optimizerG, loss_id=2) as scaled:
        scaled.backward()
    optimizerG.step()
    losses.append((fake.float() - real).pow(2).mean().item())
