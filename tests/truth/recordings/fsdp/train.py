import torch, os
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
dist.init_process_group("nccl"); torch.cuda.set_device(0)
cfg=LlamaConfig(num_hidden_layers=2,hidden_size=256,intermediate_size=704,num_attention_heads=4,num_key_value_heads=2,vocab_size=4000,use_cache=False)
m=LlamaForCausalLM(cfg).cuda().to(torch.bfloat16)
for l in m.model.layers: fully_shard(l)
fully_shard(m)
o=torch.optim.AdamW(m.parameters())
for i in range(6):
    x=torch.randint(0,4000,(2,128)).cuda()
    loss=m(input_ids=x,labels=x).loss
    loss.backward()
    o.step(); o.zero_grad()
