import torch
torch.manual_seed(0)
m=torch.nn.Sequential(torch.nn.Linear(256,512),torch.nn.ReLU(),torch.nn.Linear(512,256)).cuda()
o=torch.optim.AdamW(m.parameters())
p=torch.empty(1000,device='cpu').pin_memory()
s=torch.cuda.Stream()
for i in range(5):
    x=torch.randn(64,256,device='cuda')
    with torch.cuda.stream(s):
        y=torch.empty(1000,1000,device='cuda')
    y.record_stream(torch.cuda.current_stream())
    loss=m(x).pow(2).mean()
    del y
    loss.backward()
    o.step(); o.zero_grad()
