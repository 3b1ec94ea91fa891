//! A tape as Python records it: a capture tells of births, deaths, marks and names, and gets a ledger.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use vramledger::ledger::{
    Bytes, Category, Device, DeviceId, DeviceKind, Dtype, Event, Label, LabelId, Layout, Mark, Object,
    ObjectId, Phase, Pool, Provenance, Stream, Tape, Unit,
};
use vramledger::wire::{About, Parameters};

use crate::document::{Body, Document};
use crate::failure::raise;

/// A tape of requested bytes on one GPU, being recorded.
#[pyclass(module = "vramledger._native")]
pub struct Recorder {
    tape: Tape,
    objects: usize,
}

fn unknown(what: &str, word: &str) -> PyErr {
    PyValueError::new_err(format!("no {what} is called `{word}`"))
}

impl Recorder {
    fn label(&mut self, name: &str, owner: Option<&str>, category: &str, saved: bool) -> PyResult<LabelId> {
        let category: Category = category.parse().map_err(|()| unknown("category", category))?;
        let (name, owner) = (self.tape.intern(name), owner.map(|owner| self.tape.intern(owner)));
        Ok(self.tape.intern_label(Label { name, owner, category, saved }))
    }

    fn known(&self, object: u32) -> PyResult<ObjectId> {
        let error = || PyValueError::new_err(format!("the tape has no object {object}"));
        ((object as usize) < self.objects).then_some(ObjectId(object)).ok_or_else(error)
    }
}

#[pymethods]
impl Recorder {
    /// An empty tape on the GPU of that name in the catalogue and host memory; without a name on the host alone.
    #[new]
    #[pyo3(signature = (gpu, capacity=None, context=None))]
    fn new(gpu: Option<&str>, capacity: Option<u64>, context: Option<u64>) -> PyResult<Self> {
        let device =
            |name: &str, kind, capacity, context| Device { name: name.into(), kind, capacity, context };
        let Some(gpu) = gpu else {
            let devices = vec![device("host", DeviceKind::Cpu, None, None)];
            return Ok(Self { tape: Tape::new(Unit::Requested, devices), objects: 0 });
        };
        let gpu = vramledger::find_gpu(gpu).map_err(raise)?;
        let capacity = capacity.map_or(gpu.capacity, Bytes::new);
        let context = context.map_or(vramledger::CONTEXT, Bytes::new);
        let devices = vec![
            device(gpu.name, DeviceKind::Gpu, Some(capacity), Some(context)),
            device("host", DeviceKind::Cpu, None, None),
        ];
        Ok(Self { tape: Tape::new(Unit::Requested, devices), objects: 0 })
    }

    /// An object comes to be on the GPU, or on the host; its number.
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn alloc(
        &mut self,
        bytes: u64,
        host: bool,
        name: &str,
        owner: Option<&str>,
        category: &str,
        dtype: Option<&str>,
        shape: Option<Vec<u64>>,
    ) -> PyResult<u32> {
        let label = self.label(name, owner, category, false)?;
        let dtype = dtype.and_then(|word| Dtype::ALL.into_iter().find(|dtype| dtype.as_str() == word));
        let layout = dtype.zip(shape).map(|(dtype, shape)| {
            self.tape.intern_layout(&Layout { dtype, shape: shape.into_boxed_slice() })
        });
        let object = self.tape.new_object(Object { label, layout });
        let object = object.map_err(|error| PyValueError::new_err(error.to_string()))?;
        let device = DeviceId(u16::from(host && self.tape.devices.len() > 1));
        let bytes = Bytes::new(bytes);
        self.tape.push(Event::Alloc { object, bytes, device, stream: Stream(0), pool: Pool(0) });
        self.objects += 1;
        Ok(object.0)
    }

    /// An object is gone.
    fn free(&mut self, object: u32) -> PyResult<()> {
        let object = self.known(object)?;
        self.tape.push(Event::Free(object));
        Ok(())
    }

    /// What is learnt later of an object: its name, owner, category, and whether autograd keeps it.
    fn relabel(
        &mut self,
        object: u32,
        name: &str,
        owner: Option<&str>,
        category: &str,
        saved: bool,
    ) -> PyResult<()> {
        let (object, label) = (self.known(object)?, self.label(name, owner, category, saved)?);
        self.tape.push(Event::Relabel(object, label));
        Ok(())
    }

    /// What an object was from its birth.
    fn rename(
        &mut self,
        object: u32,
        name: &str,
        owner: Option<&str>,
        category: &str,
        saved: bool,
    ) -> PyResult<()> {
        let (object, label) = (self.known(object)?, self.label(name, owner, category, saved)?);
        self.tape.set_label(object, label);
        Ok(())
    }

    /// What follows belongs to this step, micro-batch and phase.
    fn mark(&mut self, step: u32, micro_batch: Option<u32>, phase: &str) -> PyResult<()> {
        let place =
            Phase::NAMES.iter().position(|name| *name == phase).ok_or_else(|| unknown("phase", phase))?;
        self.tape.mark(Mark { step, micro_batch, phase: Phase(place as u16), text: None });
        Ok(())
    }

    /// The ledger of what was recorded, through the allocator; `subject` is JSON.
    fn finish(
        &self,
        py: Python<'_>,
        name: String,
        subject: &str,
        parameters: Option<(u64, u64, u64)>,
        assumptions: Vec<String>,
        alloc_conf: &str,
    ) -> PyResult<Document> {
        let subject =
            serde_json::from_str(subject).map_err(|error| PyValueError::new_err(error.to_string()))?;
        let parameters = parameters.map(|(total, trainable, bytes)| Parameters { total, trainable, bytes });
        // On the host a real run is followed; on a GPU it is one of fake tensors.
        let is_measured = self.tape.devices.iter().all(|device| device.kind == DeviceKind::Cpu);
        let provenance = if is_measured { Provenance::Measured } else { Provenance::Emulated };
        let about = About { subject, parameters, assumptions, ..About::new(provenance) };
        let tape = self.tape.clone();
        let ledger =
            py.detach(|| vramledger::account(&name, about.clone(), &tape, alloc_conf).map_err(raise))?;
        let body = Body::Ledger(Box::new(ledger));
        Ok(Document { tape: Some((about, tape)), ..Document::new(name, body) })
    }
}
