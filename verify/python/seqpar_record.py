# SPDX-License-Identifier: MIT OR Unlicense
"""Writes down a training step of a plain torch loop, or a call of an attention, for `seqpar-verify ver`. It needs torch, and so has a
module of its own: seqpar_dump needs numpy alone, and takes arrays of JAX, too.

    with seqpar_record.record(model, optimizer, "dump", sp=1) as step:     # the one line more
        for batch in micro_batches:
            ...                                                            # forward, loss, backward
        step.loss = loss                                                   # what the loop reports, where it reports one
        optimizer.step()

    seqpar-verify ver dump

Every rank writes its file when the block ends: the tokens that the model's embedding was called with; labels and log-probs of
torch's cross_entropy or nll_loss; each parameter's gradient as backward() left it and as optimizer.step() found it, before
torch.nn.utils.clip_grad_norm_ where that is called; the norm that the clip gave; the parameters before and after, with what AdamW
or SGD was set to. Without step.loss, the loss is what backward() was called with, if gradients are averaged by
DistributedDataParallel or there is one rank; else it is left out, and that is said. A loss that calls neither function, a compiled
model and sharded parameters are refused. Gradients are judged by the same step on one rank, --want, or by the model as it was
before the step, --model.

sp: how many ranks share a sequence; 1: each rank has rows of its own. With sp above 1, row= says what a rank's tokens are in
the whole row:

    record(model, optimizer, "dump", sp=2, row=dict(index=places, cu_seqlens=torch.tensor([0, 11, 24])))
        index: the places of this rank's tokens in the row, the same for all rows of the step, or a function of (ids, number) for
        row number of the step. A model that is given the whole row on every rank, and splits it behind the embedding, has
        that rank's places here, too: its tokens are picked from the row. row= may have positions, too.

An attention:

    with seqpar_record.record_attention((torch.nn.functional, "scaled_dot_product_attention"), "dump", sp=2,
                                        index=places, cu_seqlens=cu_seqlens):
        ...                                                                # forward and backward

takes q, k, v, out and their gradients from the first call. The target is a module, a function's owner and name, or a function, in
whose place the one that `with ... as` gives is called.
"""
import inspect
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed
from torch.overrides import TorchFunctionMode

import seqpar_dump

IGNORED = -100


def _ranks():
    """This rank, and how many there are."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if there else (0, 1)


def _of_all(x):
    """x of every rank."""
    rank, world = _ranks()
    if world == 1:
        return [x]
    found = [None] * world
    torch.distributed.all_gather_object(found, x)
    return found


def _stop_if(sentence):
    """Every rank stops if one does, so that none waits for it."""
    for rank, text in enumerate(_of_all(sentence)):
        if text:
            raise ValueError(text if _ranks()[1] == 1 else f"rank {rank}: {text}")


@contextmanager
def _replaced(owner, name, other):
    whole = getattr(owner, name)
    setattr(owner, name, other(whole))
    try:
        yield
    finally:
        setattr(owner, name, whole)


# ---- the loss ----


def _arguments(function, given, named):
    """A call's arguments by name, with those that the function has by default."""
    try:
        bound = inspect.signature(function).bind(*given, **named)
        bound.apply_defaults()
        return dict(bound.arguments)
    except (TypeError, ValueError):  # torch's own has no signature
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        return {"is_causal": False, **dict(zip(names, given)), **named}


def of_tokens(logits):
    """(tokens, classes) of logits as cross_entropy takes them, (n, classes) or (batch, classes, n)."""
    return logits.movedim(1, -1).flatten(0, -2)


class losses_of(TorchFunctionMode):
    """Within its block, labels and log-probs of each call of torch's cross_entropy and nll_loss, however they were imported: add(labels,
    logp, odd), of shape (n). odd: why they do not make the loss; None: they do. begin(loss) is called before each backward pass."""

    def __init__(self, add, begin=None):
        super().__init__()
        self.add, self.begin = add, begin

    def __torch_function__(self, function, types, given=(), named=None):
        if function is torch.Tensor.backward and self.begin:
            self.begin(given[0])
        if function in (torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss):
            self.seen(function, **_arguments(function, given, named or {}))
        return function(*given, **(named or {}))

    def seen(self, function, input, target, ignore_index=IGNORED, **more):
        if input.dim() < 2 or target.is_floating_point():
            return
        labels = target.flatten()
        odd = "weight" if more.get("weight") is not None else "label_smoothing" if more.get("label_smoothing") else None
        logp = -function(of_tokens(input.detach()), labels, reduction="none", ignore_index=ignore_index)
        self.add(labels.masked_fill(labels == ignore_index, IGNORED), logp,
                 odd and f"the loss has {odd}=, and is no sum of log-probs; write its arrays with seqpar_dump.Dump")


def _embedding(model):
    own = getattr(model, "get_input_embeddings", None)
    found = own() if own else next((m for m in model.modules() if isinstance(m, torch.nn.Embedding)), None)
    if found is None:
        raise ValueError(f"{type(model).__name__} has no torch.nn.Embedding, whose input is the tokens; use seqpar_dump.Dump")
    return found


# ---- a loop ----


def record(model, optimizer, folder, sp=None, row=None, **keywords):
    """The first step of optimizer within the block. keywords: those of seqpar_dump.Dump, as dtype=. step.loss is the step's loss."""
    return _Step(model, optimizer, folder, sp, row, keywords)


class Update:
    """Hooks of an optimizer's step: parameters before and after it, AdamW's moments before it, and the settings."""

    def __init__(self, optimizer, named_parameters, max_norm=lambda: None, before=lambda: None, after=lambda: None):
        """before() and after() are called with the step; max_norm() is the clip's, None without one."""
        self.optimizer, self.names, self.max_norm = optimizer, dict(named_parameters), max_norm
        self.begin, self.end, self.arrays, self.settings = before, after, {}, {}
        self.hooks = [optimizer.register_step_pre_hook(self.take_before), optimizer.register_step_post_hook(self.take_after)]

    def detach(self):
        for hook in self.hooks:
            hook.remove()

    def named(self, of):
        """Of each parameter that has a gradient."""
        return {name: of(p) for name, p in self.names.items() if p.grad is not None}

    def take_before(self, *_):
        self.begin()
        if self.arrays:
            return
        state, self.settings = self.optimizer.state, self.settings_of_kind()
        if self.settings:
            steps = [int(x["step"]) for x in state.values() if "step" in x]
            self.settings.update(step=1 + max(steps, default=0), max_norm=self.max_norm())
        self.arrays["param"] = self.named(lambda p: p.detach().clone())
        for key, name in (("m", "exp_avg"), ("v", "exp_avg_sq")):
            there = {p: x[name].detach().clone() for p, x in state.items() if name in x}
            self.arrays[key] = self.named(there.get)

    def take_after(self, *_):
        self.arrays.setdefault("after", self.named(lambda p: p.detach().clone()))
        self.end()

    def settings_of_kind(self):
        """Empty where seqpar-verify does not compute this optimizer, or parameters differ in more than lr and weight_decay."""
        groups, kind = self.optimizer.param_groups, type(self.optimizer).__name__
        group, own = groups[0], ("params", "lr", "initial_lr", "weight_decay")
        named = {name: self.by_parameter(name) for name in ("lr", "weight_decay") if name in group}
        same = all(g.get(name) == x for g in groups for name, x in group.items() if name not in own)
        if not same or group.get("maximize") or group.get("amsgrad"):
            return {}
        if kind == "SGD" and not group["momentum"] and not any(g["weight_decay"] for g in groups):
            return dict(named, optimizer="sgd")
        if kind == "AdamW" or (kind == "Adam" and not any(g["weight_decay"] for g in groups)):
            return dict(named, optimizer="adamw", beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"])
        return {}

    def by_parameter(self, name):
        """The number of all groups, or a dict by parameter where they differ."""
        numbers = {id(p): group[name] for group in self.optimizer.param_groups for p in group["params"]}
        of = self.named(lambda p: numbers.get(id(p)))
        return of if len({x for x in of.values() if x is not None}) > 1 else self.optimizer.param_groups[0][name]

    def written(self):
        """Arguments of seqpar_dump.Dump.step."""
        return {**self.arrays, **self.settings} if self.settings else {}

    def lacks(self):
        return (f"the update of {type(self.optimizer).__name__} is not written: seqpar-verify computes AdamW and plain SGD, in whose "
                "groups lr and weight_decay alone differ")


class _Step:
    def __init__(self, model, optimizer, folder, sp, row, keywords):
        self.model = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
        self.is_reduced = self.model is not model
        self.optimizer, self.folder, self.sp, self.row, self.keywords = optimizer, folder, sp, row, keywords
        self.loss, self.norm, self.max_norm, self.is_over, self.is_scaled = None, None, None, False, False
        self.ids, self.micro_batches, self.local, self.values, self.odd = None, [], {}, [], None
        self.gradients = None
        self.refuse()

    def refuse(self):
        rank, world = _ranks()
        if self.sp is None and world > 1:
            raise ValueError(f"{world} ranks: give sp=1 if each has rows of its own, or sp={world} and row= if they share sequences")
        self.sp = self.sp or 1
        if self.sp < 1 or world % self.sp:
            raise ValueError(f"sp is {self.sp}, and there are {world} ranks; give a divisor of that")
        if self.sp > 1 and self.row is None:
            raise ValueError(f"sp is {self.sp}: give row=dict(index=..., cu_seqlens=...), the places of its tokens in the whole row")
        if hasattr(self.model, "_orig_mod"):
            raise ValueError("the model is compiled, and what it computes is not seen; give it before torch.compile for the recorded step")
        if any(hasattr(p, "placements") for p in self.model.parameters()):
            raise ValueError("parameters are sharded (FSDP), and a rank has no whole gradient; use seqpar_dump.Dump with part=")
        if getattr(self.model, "seqpar_recorder", None):
            raise ValueError(f"this model is recorded to {self.model.seqpar_recorder} already; end that block first")

    def __enter__(self):
        self.model.__dict__["seqpar_recorder"] = self.folder
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.hooks = [_embedding(self.model).register_forward_pre_hook(self.take_ids)]
        self.update = Update(self.optimizer, self.model.named_parameters(), lambda: self.max_norm, self.take_gradients, self.end_step)
        if not self.is_reduced:  # else gradients are reduced while backward() runs
            self.hooks += [p.register_post_accumulate_grad_hook(self.take_local) for p in parameters]
        self.replaced = ExitStack()
        for one in (losses_of(self.take_loss, self.take_value), _replaced(torch.nn.utils, "clip_grad_norm_", self.watched_clip),
                    _replaced(torch.amp.GradScaler, "scale", self.watched_scale)):
            self.replaced.enter_context(one)
        return self

    def __exit__(self, kind, *rest):
        self.replaced.close()
        self.update.detach()
        for hook in self.hooks:
            hook.remove()
        del self.model.__dict__["seqpar_recorder"]
        if kind is None:
            self.write()

    # ---- what hooks see ----

    def take_ids(self, module, given):
        if not self.is_over and given and given[0].dim() and not given[0].is_floating_point():
            self.ids = given[0].detach().clone()

    def take_loss(self, labels, logp, odd):
        """The first loss behind a forward pass opens a micro-batch. Further ones are of further tokens of it, or of another head."""
        if self.is_over or (self.ids is None and not self.micro_batches):
            return
        if self.ids is not None:
            self.micro_batches.append((self.ids.reshape(-1, self.ids.shape[-1]), []))
        self.ids, self.odd = None, self.odd or odd
        self.micro_batches[-1][1].append((labels, logp.detach()))

    def take_value(self, loss):
        if not self.is_over and loss.numel() == 1:
            self.values.append(float(loss.detach()))

    def watched_scale(self, whole):
        """Of a scaled loss, the value of backward() and the gradients before optimizer.step() are none of the step's."""

        def scale(*given):
            self.is_scaled = given[0].is_enabled()
            return whole(*given)

        return scale

    def take_local(self, parameter):
        if not self.is_over:
            self.local[parameter] = parameter.grad.detach().clone()

    def watched_clip(self, whole):
        def clip(parameters, max_norm, *rest, **named):
            self.take_gradients()
            norm = whole(parameters, max_norm, *rest, **named)
            if not self.is_over:
                self.norm, self.max_norm = float(norm), float(max_norm)
            return norm

        return clip

    def take_gradients(self):
        if not self.is_over and self.gradients is None:
            self.gradients = {name: None if p.grad is None else p.grad.detach().clone() for name, p in self.model.named_parameters()}

    def end_step(self):
        self.is_over = True

    # ---- writing ----

    def rows(self):
        """ids, labels and log-probs of each row of each micro-batch."""
        found = []
        for ids, losses in self.micro_batches:
            for count in (len(losses), 1):  # all of them, or the first alone
                labels, logp = (torch.cat(x) for x in zip(*losses[:count]))
                if len(labels) in (ids.numel(), ids.numel() - len(ids)) or self.sp > 1 or count == 1:
                    break
            if len(labels) % len(ids):
                raise ValueError(f"the loss has {len(labels)} labels, and the model was given {len(ids)} rows of {ids.shape[1]} tokens; "
                                 "write their arrays with seqpar_dump.Dump")
            found += zip(ids, labels.reshape(len(ids), -1), logp.reshape(len(ids), -1))
        return found

    def arrays(self, number, ids, labels, logp):
        """Of a row: what this rank has of it, by its places."""
        more = (self.row(ids, number) if callable(self.row) else self.row) or {}
        index = torch.as_tensor(more.get("index", torch.arange(len(ids)))).to(ids.device)
        is_whole = len(index) < len(ids) and int(index.max()) < len(ids)
        if len(ids) != len(index) and not is_whole:
            raise ValueError(f"row {number} has {len(index)} places up to {int(index.max())} in row=, and the model was given {len(ids)} "
                             "tokens; give the places of this rank's tokens, one each")
        arrays = dict(more, index=index, ids=ids[index] if is_whole else ids)
        for name, x, value in (("labels", labels, IGNORED), ("logp", logp, 0)):
            x = x[index] if is_whole and len(x) == len(ids) else x
            if len(x) not in (len(index), len(index) - 1):  # one less where a model shifts labels itself
                raise ValueError(f"row {number} has {len(index)} tokens on this rank, and {len(x)} labels; use seqpar_dump.Dump")
            arrays[name] = torch.nn.functional.pad(x, (0, len(index) - len(x)), value=value)
        return arrays

    def fault(self):
        """Why there is nothing to write; None: there is."""
        if not self.is_over:
            return "the block ended without a call of optimizer.step(); put the whole step into it"
        if not self.micro_batches:
            return ("no call of torch.nn.functional.cross_entropy or nll_loss was seen behind one of the model; write this step's "
                    "arrays with seqpar_dump.Dump")
        return self.odd

    def reported(self):
        """The loss: what the loop said, or what backward() was called with, where ranks' gradients are averaged or there is one rank."""
        if self.loss is not None or self.is_scaled or not self.values or not (self.is_reduced or _ranks()[1] == 1):
            return self.loss
        found = _of_all(sum(self.values))
        return sum(found) / len(found)

    def write(self):
        _stop_if(self.fault())
        rows, sentence = [], None
        try:
            rows = [self.arrays(number, *row) for number, row in enumerate(self.rows())]
        except ValueError as error:
            sentence = str(error)
        _stop_if(sentence)
        counts = _of_all(len(rows))
        if len(set(counts)) > 1:
            raise ValueError(f"ranks have {', '.join(map(str, counts))} rows in this step; record one in which all have as many")
        dump = seqpar_dump.Dump(self.folder, *_ranks(), sp=self.sp, accumulation=len(rows), **self.keywords)
        for number, arrays in enumerate(rows):
            dump.micro_batch(number, **arrays)
        self.loss = self.reported()
        names = {p: name for name, p in self.model.named_parameters()}
        local = {} if self.is_scaled else {names[p]: x for p, x in self.local.items()}
        dump.step(self.loss, self.gradients, norm=self.norm, local=local, **self.update.written())
        if _ranks()[0] == 0:
            self.say()

    def say(self):
        if self.loss is None:
            print("seqpar_record: the loss is not written; set step.loss within the block to what the loop reports")
        if self.is_scaled:
            print("seqpar_record: gradients before their reduction are not written: a GradScaler has scaled them")
        if not self.update.settings:
            print(f"seqpar_record: {self.update.lacks()}")
        print(f"seqpar_record: seqpar-verify ver {self.folder}")


# ---- an attention ----

LAYOUTS = {"thd": "(tokens, heads, head_dim)", "bhsd": "(batch, heads, tokens, head_dim)", "bshd": "(batch, tokens, heads, head_dim)"}


@contextmanager
def record_attention(target, folder, index=None, cu_seqlens=None, sp=1, layout=None, **keywords):
    """The first call of target within the block. target: a module; an owner and a name, as (flash_attn, "flash_attn_varlen_func"); or
    a function, in whose place what the block is given is called. index and cu_seqlens as in seqpar_dump, of all rows of a batch.
    layout: thd, bhsd (as scaled_dot_product_attention has it, without layout=) or bshd. keywords: window=, softcap=, softmax_scale=
    and dtype= where the call's own arguments do not say them."""
    call = _Call(folder, index, cu_seqlens, sp, layout, keywords)
    if isinstance(target, torch.nn.Module):
        hooks = [target.register_forward_pre_hook(call.before_module, with_kwargs=True), target.register_forward_hook(call.after_module)]
        try:
            yield target
        finally:
            for hook in hooks:
                hook.remove()
    elif isinstance(target, tuple):
        with _replaced(*target, call.watched):
            yield getattr(*target)
    elif callable(target):
        yield call.watched(target)
    else:
        raise ValueError(f"a {type(target).__name__} is no attention; give a module, a function, or its owner and name")
    call.write()


class _Call:
    names = (("q", "query"), ("k", "key"), ("v", "value"))

    def __init__(self, folder, index, cu_seqlens, sp, layout, keywords):
        rank, world = _ranks()
        if layout not in (None, *LAYOUTS):
            raise ValueError(f"layout is {layout}; give " + ", ".join(f"{name} for {shape}" for name, shape in LAYOUTS.items()))
        if sp > 1 and (index is None or cu_seqlens is None):
            raise ValueError(f"sp is {sp}: give index=, the places of this rank's tokens in the whole row, and cu_seqlens=, its documents")
        self.folder, self.index, self.cu_seqlens, self.sp, self.layout, self.keywords = folder, index, cu_seqlens, sp, layout, keywords
        self.x, self.is_open, self.rank, self.world = {}, True, rank, world

    # ---- the call ----

    def watched(self, whole):
        def call(*given, **named):
            if not self.is_open:
                return whole(*given, **named)
            self.is_open = False
            given, named = self.take_inputs(given, named, whole, getattr(whole, "__name__", "the attention"))
            return self.take_output(whole(*given, **named))

        return call

    def before_module(self, module, given, named):
        if not self.is_open:
            return None
        self.is_open = False
        return self.take_inputs(given, named, module.forward, type(module).__name__)

    def after_module(self, module, given, output):
        return None if "out" in self.x or not self.x else self.take_output(output)

    def take_inputs(self, given, named, called, function):
        """q, k and v are passed on as views: gradients of these are those of this call alone."""
        self.set_facts(_arguments(called, given, named), function)
        given, named = list(given), dict(named)
        for place, words in enumerate(self.names):
            word = next((w for w in words if w in named), None)
            x = named[word] if word else given[place] if place < len(given) else None
            if not torch.is_tensor(x) or x.dim() not in (3, 4):
                raise ValueError(f"{function} was not called with q, k and v of 3 or 4 dimensions; record a function that is")
            x = self.take(words[0], x.view_as(x))
            if word:
                named[word] = x
            else:
                given[place] = x
        self.layout = self.layout or self.layout_of(x, function)
        return tuple(given), named

    def take(self, name, x):
        self.x[name] = x.detach().clone()
        if x.requires_grad:
            x.register_hook(lambda gradient: self.x.update({f"d{name}": gradient.detach().clone()}))
        return x

    def take_output(self, output):
        out = output[0] if isinstance(output, (tuple, list)) else output
        viewed = self.take("out", out.view_as(out))
        return type(output)([viewed, *output[1:]]) if isinstance(output, (tuple, list)) else viewed

    @staticmethod
    def layout_of(x, function):
        if x.dim() == 3:
            return "thd"
        if function == "scaled_dot_product_attention":
            return "bhsd"
        raise ValueError(f"{function} has q, k and v of shape {list(x.shape)}: give layout=\"bhsd\" for {LAYOUTS['bhsd']}, "
                         f"layout=\"bshd\" for {LAYOUTS['bshd']}")

    def set_facts(self, given, function):
        """Settings of the call by flash_attn's names and torch's; what is not causal is not judged."""
        causal, masked = given.get("causal", given.get("is_causal")), given.get("attn_mask") is not None
        if given.get("dropout_p"):
            raise ValueError(f"{function} has dropout_p={given['dropout_p']}, whose result seqpar-verify does not compute; give 0 here")
        if causal is not None and not causal and not masked:
            raise ValueError(f"{function} has no causal mask; seqpar-verify judges causal attention")
        left = (given.get("window_size") or (-1, -1))[0]
        seen = dict(softmax_scale=given.get("softmax_scale", given.get("scale")), softcap=given.get("softcap") or None,
                    window=left + 1 if left >= 0 else None)
        self.keywords = {**seen, **self.keywords}
        if self.cu_seqlens is None and self.sp == 1:
            self.cu_seqlens = given.get("cu_seqlens_q")

    # ---- writing ----

    def rows(self):
        """Of each row of the batch, (tokens, heads, head_dim) by name."""
        turned = {name: x.transpose(1, 2) if self.layout == "bhsd" else x for name, x in self.x.items()}
        if self.layout == "thd":
            return [turned]
        return [{name: x[b] for name, x in turned.items()} for b in range(len(turned["q"]))]

    def fault(self):
        if "out" not in self.x:
            return "the block did not call the attention; put its forward and backward pass into it"
        tokens = len(self.rows()[0]["q"])
        if self.index is not None and len(self.index) != tokens:
            return f"index= has {len(self.index)} places, and the attention was called with {tokens} tokens; give one place each"
        return None

    def write(self):
        _stop_if(self.fault())
        rows = self.rows()
        dump = seqpar_dump.Dump(self.folder, self.rank, self.world, sp=self.sp, accumulation=len(rows), **self.keywords)
        for number, arrays in enumerate(rows):
            tokens = len(arrays["q"])
            dump.micro_batch(number, index=torch.arange(tokens) if self.index is None else self.index,
                             cu_seqlens=torch.tensor([0, tokens]) if self.cu_seqlens is None else self.cu_seqlens)
            dump.attention(number, **arrays)
        dump.step()
        if self.rank == 0:
            missing = [name for name in ("dout", "dq", "dk", "dv") if name not in rows[0]]
            if missing:
                print(f"seqpar_record: {', '.join(missing)} not written: no backward pass in the block reached them")
            print(f"seqpar_record: seqpar-verify ver {self.folder} --require attention")
