//! A real program on an emulated GPU: how it is started, and the ledger of what it did.
//!
//! Starting it is for the caller, who alone has processes: [`EmulationQuestion::environment`] says
//! with which variables, [`BOOTSTRAP`] with which files, and [`emulation`] reads what it left.

mod answer;
mod recorded;
mod software;

use ledger::Bytes;
use models::Gpu;
use serde::Deserialize;

pub use answer::{Emulation, End, emulation};
pub(crate) use recorded::Recorded;
pub use software::{PROBE, Software, elsewhere};

use crate::Error;

/// The files that go into a folder at the front of `PYTHONPATH`: they let the recorder in.
pub const BOOTSTRAP: [(&str, &str); 4] = [
    ("sitecustomize.py", include_str!("../../emulator/bootstrap/sitecustomize.py")),
    ("vramledger_host.py", include_str!("../../emulator/bootstrap/vramledger_host.py")),
    ("vramledger_ranks.py", include_str!("../../emulator/bootstrap/vramledger_ranks.py")),
    ("vramledger_recorder.py", include_str!("../../emulator/bootstrap/vramledger_recorder.py")),
];

/// The port where a job's ranks would meet; none of them is there.
const MASTER_PORT: u16 = 29_500;

/// What `emulate` is asked.
#[derive(Clone, Debug)]
pub struct EmulationQuestion {
    /// The program and its arguments.
    pub program: Vec<String>,
    /// The card, with the capacity that counts.
    pub gpu: Gpu,
    /// What of the capacity the allocator never sees.
    pub context: Bytes,
    /// The allocator's settings, where they are not those of the environment.
    pub alloc_conf: Option<String>,
    /// After how many optimizer steps the program is stopped; none: it runs to its end.
    pub steps: Option<u32>,
    /// Which process of a job it is, where it is one of several.
    pub rank: Option<Rank>,
}

/// One process of a job with one GPU for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rank {
    /// Its number in the job, from 0.
    pub rank: u32,
    /// How many GPUs, and so processes, the job has.
    pub gpus: u32,
    /// Over how many machines they are spread evenly.
    pub nodes: u32,
}

impl Rank {
    /// Rank `rank` of `gpus` processes on `nodes` machines.
    ///
    /// # Errors
    /// Machines that would not have the same number of GPUs, or a rank that the job does not have.
    pub fn new(rank: u32, gpus: u32, nodes: u32) -> Result<Self, Error> {
        if gpus == 0 || nodes == 0 || !gpus.is_multiple_of(nodes) {
            return Err(Error::out_of_range(
                "--gpus",
                format!("a multiple of the {nodes} of `--nodes`"),
                gpus,
            ));
        }
        if rank >= gpus {
            return Err(Error::out_of_range("--rank", format!("below the {gpus} of `--gpus`"), rank));
        }
        Ok(Self { rank, gpus, nodes })
    }

    /// How many of the job's processes share a machine.
    pub const fn on_one_node(self) -> u32 {
        self.gpus / self.nodes
    }
}

impl EmulationQuestion {
    /// Refuses a context that leaves nothing of the card.
    ///
    /// # Errors
    /// As said.
    pub fn check(&self) -> Result<(), Error> {
        if self.context >= self.gpu.capacity {
            let range = format!("less than the capacity, {}", self.gpu.capacity);
            return Err(Error::out_of_range("--context", range, self.context));
        }
        Ok(())
    }

    /// The variables of the program's environment that describe the card, the steps and the job.
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        let (major, minor) = self.gpu.compute_capability;
        let mut variables = vec![
            ("VRAMLEDGER_GPU_NAME", format!("NVIDIA {}", self.gpu.name)),
            ("VRAMLEDGER_GPU_CAPABILITY", format!("{major}.{minor}")),
            ("VRAMLEDGER_GPU_SMS", self.gpu.multiprocessors.to_string()),
            ("VRAMLEDGER_GPU_CAPACITY", self.gpu.capacity.get().to_string()),
            ("VRAMLEDGER_GPU_CONTEXT", self.context.get().to_string()),
            ("VRAMLEDGER_STEPS", self.steps.map_or_else(|| "all".into(), |steps| steps.to_string())),
        ];
        if let Some(settings) = &self.alloc_conf {
            // Releases before 2.9 know the first alone, later ones ask the second first.
            variables.push(("PYTORCH_CUDA_ALLOC_CONF", settings.clone()));
            variables.push(("PYTORCH_ALLOC_CONF", settings.clone()));
        }
        if let Some(rank) = self.rank {
            let local = rank.on_one_node();
            variables.extend([
                ("VRAMLEDGER_GPU_COUNT", local.to_string()),
                ("VRAMLEDGER_ONE_RANK", "1".into()),
                ("RANK", rank.rank.to_string()),
                ("LOCAL_RANK", (rank.rank % local).to_string()),
                ("WORLD_SIZE", rank.gpus.to_string()),
                ("LOCAL_WORLD_SIZE", local.to_string()),
                ("GROUP_RANK", (rank.rank / local).to_string()),
                ("MASTER_ADDR", "localhost".into()),
                ("MASTER_PORT", MASTER_PORT.to_string()),
            ]);
        }
        variables
    }
}

/// How far the program is: a line of the `progress.jsonl` that the recorder writes.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Progress {
    /// The step, from 1; 0 is the load.
    pub step: u32,
    /// The micro-batch, from 1; none in load and update.
    pub micro_batch: Option<u32>,
    /// The phase.
    pub phase: String,
    /// Block bytes when it began.
    pub allocated_bytes: u64,
}

impl Progress {
    /// The progress that a line tells; none where it is not whole.
    pub fn read(line: &str) -> Option<Self> {
        serde_json::from_str(line).ok()
    }

    /// `step 2, backward`.
    pub fn place(&self) -> String {
        match self.step {
            0 => self.phase.clone(),
            step => format!("step {step}, {}", self.phase),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(rank: Option<Rank>) -> EmulationQuestion {
        EmulationQuestion {
            program: vec!["python".into(), "train.py".into()],
            gpu: models::GPUS[0].clone(),
            context: Bytes::mib(550),
            alloc_conf: None,
            steps: Some(3),
            rank,
        }
    }

    #[test]
    fn a_rank_knows_its_machine() {
        let rank = Rank::new(11, 16, 2).unwrap();
        let environment = question(Some(rank)).environment();
        let variable = |name: &str| {
            let found = environment.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| value.as_str()).unwrap_or_default().to_owned()
        };
        let names =
            ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "VRAMLEDGER_GPU_COUNT"];
        assert_eq!(names.map(variable), ["11", "3", "16", "8", "1", "8"]);
        assert!(question(None).environment().iter().all(|(name, _)| !name.ends_with("RANK")));
    }

    #[test]
    fn jobs_that_cannot_be_are_refused() {
        let refusal = |rank, gpus, nodes| Rank::new(rank, gpus, nodes).unwrap_err().to_string();
        assert_eq!(refusal(8, 8, 1), "`--rank` must be below the 8 of `--gpus`, not 8");
        assert_eq!(refusal(0, 8, 3), "`--gpus` must be a multiple of the 3 of `--nodes`, not 8");
    }

    #[test]
    fn half_a_line_of_progress_tells_nothing() {
        let line = r#"{"mark": 7, "step": 2, "micro_batch": 1, "phase": "backward", "allocated_bytes": 512}"#;
        assert_eq!(Progress::read(line).unwrap().place(), "step 2, backward");
        assert_eq!(Progress::read(&line[..40]), None);
    }
}
