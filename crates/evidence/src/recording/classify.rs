//! What an object is for: by its label, else by where it was made and how long it lived.

use std::collections::{BTreeMap, HashMap};

use ledger::{Category, Event, Label, Mark, MarkId, ObjectId, Phase, Tape};

use super::{Named, note};
use crate::pickle::Text;
use crate::snapshot::{Entry, Origin, Snapshot, Stack, Taped};

/// Workspaces of cuBLAS and cublasLt that PyTorch allocates, in bytes: 32 MiB on Hopper and Blackwell, 4096 KiB
/// twice and 16 KiB eight times elsewhere, 1 MiB for cublasLt. Before 2.15 it keeps them.
const CUBLAS: [u64; 3] = [32 << 20, 8_519_680, 1 << 20];

/// Gives every object of a recorded tape its name, owner and category, `names` first.
pub(super) fn label(taped: &mut Taped, snapshot: &Snapshot, names: &BTreeMap<ObjectId, Named>) {
    let lives = lives(taped, snapshot);
    let mut distributed = vec![None; snapshot.stacks()];
    for (index, life) in lives.iter().enumerate() {
        let object = ObjectId(index as u32);
        let stack = taped.origins[index].stack;
        let tape = &mut taped.tape;
        // What a model makes and another is called with is the first one's.
        let named = names.get(&object).filter(|named| named.category != Category::Input || !life.in_module);
        let label = if let Some(named) = named {
            let name = tape.intern(&kind(&named.name));
            let owner = owner(named).map(|owner| tape.intern(owner));
            Label { name, owner, category: named.category, saved: false }
        } else {
            let collective =
                *distributed[stack.0 as usize].get_or_insert_with(|| is_distributed(snapshot, stack));
            let category = if collective { Category::CommunicationBuffer } else { life.category(tape) };
            let module = life.module(snapshot);
            let name = tape.intern(&unlabelled_name(tape, snapshot, life, stack));
            let owner = (!module.is_empty()).then(|| tape.intern(module));
            Label { name, owner, category, saved: category == Category::Activation && life.is_saved(tape) }
        };
        let label = tape.intern_label(label);
        tape.set_label(object, label);
    }
}

/// A path with `*` for every number in it: the same for every layer.
fn kind(path: &str) -> String {
    let part = |part: &str| if part.parse::<u32>().is_ok() { "*".to_owned() } else { part.to_owned() };
    path.split('.').map(part).collect::<Vec<_>>().join(".")
}

/// The module that owns a named tensor: of `h.0.mlp.weight`, and of its `h.0.mlp.weight.exp_avg`.
fn owner(named: &Named) -> Option<&str> {
    let parent = |path| str::rsplit_once(path, '.').map(|(parent, _)| parent);
    let owner = match named.category {
        Category::OptimizerState => parent(parent(&named.name)?),
        _ => parent(&named.name),
    };
    owner.filter(|owner| !owner.is_empty())
}

fn unlabelled_name(tape: &Tape, snapshot: &Snapshot, life: &Life, stack: Stack) -> String {
    let module = kind(life.module(snapshot));
    match (module.as_str(), snapshot.site(stack, if module.is_empty() { 2 } else { 1 })) {
        ("", Some(site)) => site,
        ("", None) => match life.born.map(|born| tape.mark_of(born)) {
            Some(mark) => format!("made in {}", tape.phase_name(mark.phase)),
            None => "made before".to_owned(),
        },
        (module, Some(site)) => format!("{module} {site}"),
        (module, None) => module.to_owned(),
    }
}

/// Whether the innermost frame that says something is of `torch.distributed` or of DDP.
fn is_distributed(snapshot: &Snapshot, stack: Stack) -> bool {
    snapshot.telling_frames(stack).next().is_some_and(|frame| {
        let file = snapshot.text(frame.file);
        file.contains("torch/distributed/") || file.ends_with("torch/nn/parallel/distributed.py")
    })
}

/// The life of one object.
#[derive(Clone, Copy, Debug, Default)]
struct Life {
    bytes: u64,
    /// The marks it was made and let go under.
    born: Option<MarkId>,
    gone: Option<MarkId>,
    is_gone: bool,
    /// The entry's note: none where it has none.
    note: Option<Text>,
    /// Whether a module had run in this phase before it was made.
    after_modules: bool,
    /// Whether it was made after the phase had done its work: a mark of the same phase was set again.
    after_work: bool,
    /// Whether it was made inside a module.
    in_module: bool,
    /// Whether nothing else was made while it lived.
    alone: bool,
    /// Whether it was never let go, and nothing else of its size from its place in the program: what
    /// a leak keeps, it keeps again and again.
    kept_once: bool,
    /// Whether the line of the program that made it also let go of it.
    same_line: bool,
    /// Whether a module was at work while it lived.
    met_modules: bool,
}

/// Follows the tape through every object's life.
fn lives(taped: &Taped, snapshot: &Snapshot) -> Vec<Life> {
    let tape = &taped.tape;
    let mut lives = vec![Life::default(); tape.objects().len()];
    // How many requests there were so far, and how many of modules; for each object, when it was made.
    let (mut objects, mut of_modules) = (0_u64, 0_u64);
    let mut made = vec![(0, 0); lives.len()];
    let mut now: Option<MarkId> = None;
    let (mut after_modules, mut after_work) = (false, false);
    let place = |mark: MarkId| Mark { text: None, ..tape.mark_of(mark) };
    for event in tape.events() {
        match event {
            Event::Mark(mark) => {
                after_work = now.is_some_and(|now| place(now) == place(mark));
                after_modules &= after_work;
                now = Some(mark);
            }
            Event::Alloc { object, bytes, .. } => {
                let index = object.0 as usize;
                let origin = taped.origins[index];
                let entry = |entry| entry_of(taped, snapshot, origin, entry);
                let text = entry(origin.entry).map(|entry| entry.user_metadata);
                let last = entry(origin.end).map(|entry| entry.stack);
                let note = text.and_then(|text| note(snapshot.text(text)));
                let in_module = note.is_some_and(|(_, module)| !module.is_empty());
                lives[index] = Life {
                    bytes: bytes.get(),
                    born: now,
                    note: note.and(text),
                    after_modules,
                    after_work,
                    in_module,
                    same_line: origin.stack != Stack(0) && last == Some(origin.stack),
                    ..Life::default()
                };
                objects += 1;
                of_modules += u64::from(in_module);
                after_modules |= in_module;
                made[index] = (objects, of_modules);
            }
            Event::FreeRequested(object) | Event::Free(object) => {
                let life = &mut lives[object.0 as usize];
                if !life.is_gone {
                    let (objects_then, of_modules_then) = made[object.0 as usize];
                    (life.is_gone, life.gone) = (true, now);
                    life.alone = objects == objects_then;
                    life.met_modules = of_modules > of_modules_then;
                }
            }
            // What lives while a request fails is not the scratch of a kernel that ran.
            Event::Oom { .. } => objects += 1,
            _ => {}
        }
    }
    let mut kept: HashMap<(Stack, u64), u32> = HashMap::new();
    for (life, origin) in lives.iter().zip(&taped.origins).filter(|(life, _)| !life.is_gone) {
        *kept.entry((origin.stack, life.bytes)).or_default() += 1;
    }
    for (index, life) in lives.iter_mut().enumerate().filter(|(_, life)| !life.is_gone) {
        life.met_modules = of_modules > made[index].1;
        life.kept_once = kept.get(&(taped.origins[index].stack, life.bytes)) == Some(&1);
    }
    lives
}

/// The entry of the number `entry` of the trace that an object is from.
fn entry_of(taped: &Taped, snapshot: &Snapshot, origin: Origin, entry: Option<u32>) -> Option<Entry> {
    let trace = match taped.devices[usize::from(origin.device.0)] {
        Some(index) => snapshot.traces.get(index)?,
        None => &snapshot.host_trace,
    };
    Some(snapshot.entry(trace, entry? as usize))
}

impl Life {
    fn module<'a>(&self, snapshot: &'a Snapshot) -> &'a str {
        let note = self.note.and_then(|text| note(snapshot.text(text)));
        note.map_or("", |(_, module)| module)
    }

    fn category(&self, tape: &Tape) -> Category {
        let Some(born) = self.born.map(|born| tape.mark_of(born)) else { return Category::Unattributed };
        let forward = born.phase == Phase::FORWARD && (self.in_module || self.after_modules);
        let recomputed = born.phase == Phase::BACKWARD && self.in_module;
        let cublas = CUBLAS.contains(&self.bytes) && (self.alone || self.kept_once);
        if cublas || (self.alone && self.same_line && (forward || recomputed)) {
            return Category::Workspace;
        }
        if forward || recomputed {
            return Category::Activation;
        }
        // Between the phases' work the program fetches the next batch.
        let between = born.phase != Phase::BACKWARD || self.after_work;
        match (between && self.note.is_some() && self.met_modules, self.is_gone) {
            (true, _) => Category::Input,
            (false, true) => Category::Temporary,
            (false, false) => Category::Unattributed,
        }
    }

    /// Whether the backward pass of the micro-batch it was made for let go of it.
    fn is_saved(&self, tape: &Tape) -> bool {
        let (Some(born), Some(gone)) = (self.born, self.gone) else { return false };
        let (born, gone) = (tape.mark_of(born), tape.mark_of(gone));
        let batch = |mark: Mark| (mark.step, mark.micro_batch);
        born.phase == Phase::FORWARD && gone.phase == Phase::BACKWARD && batch(born) == batch(gone)
    }
}
