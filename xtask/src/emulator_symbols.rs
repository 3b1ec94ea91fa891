//! `cargo xtask emulator-symbols`: the names that a build of PyTorch wants from the CUDA libraries.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};

/// How the names of the libraries begin that the emulator stands in for.
const PREFIXES: &[&str] = &[
    "__cuda", "cublas", "cuda", "cudnn", "cufft", "cupti", "cusolver", "cusparse", "nccl", "nvml", "nvshmem",
];

/// Names left to the real libraries: they answer without a GPU, and with the version that is installed.
const LEFT: &[&str] = &[
    "cublasLtGetVersion",
    "cudaRuntimeGetVersion",
    "cudnnGetCudartVersion",
    "cudnnGetProperty",
    "cudnnGetVersion",
    "cuptiGetVersion",
    "ncclGetVersion",
];

/// Arguments of the command
#[derive(clap::Args)]
pub struct EmulatorSymbols {
    /// The `torch` package of a CUDA build, or the folder it was unpacked into
    torch: PathBuf,
    /// The list to write; standard in the repository: `crates/emulator/symbols/torch-VERSION.txt`
    #[arg(short, long)]
    output: Option<PathBuf>,
}

/// Lists the undefined CUDA names of PyTorch's libraries and writes them, sorted, one a line.
pub fn run(args: &EmulatorSymbols) -> Result<()> {
    let libraries = args.torch.join("lib");
    let mut names = BTreeSet::new();
    for entry in
        fs::read_dir(&libraries).with_context(|| format!("failed to read `{}`", libraries.display()))?
    {
        let path = entry?.path();
        if path.extension() == Some(OsStr::new("so")) {
            names.extend(undefined(&path)?);
        }
    }
    ensure!(!names.is_empty(), "`{}` holds no library that wants CUDA", libraries.display());
    let output = match &args.output {
        Some(path) => path.clone(),
        None => list_of(&args.torch)?,
    };
    let text: String = names.iter().map(|name| format!("{name}\n")).collect();
    fs::write(&output, text).with_context(|| format!("failed to write `{}`", output.display()))
}

/// The CUDA names a library wants from others, as `nm` of binutils lists them.
fn undefined(library: &Path) -> Result<Vec<String>> {
    let listing = Command::new("nm").args(["-D", "--undefined-only"]).arg(library).output();
    let listing = listing.context("failed to start `nm`; install binutils")?;
    ensure!(listing.status.success(), "`nm` cannot read `{}`", library.display());
    let text = String::from_utf8_lossy(&listing.stdout);
    let names = text.lines().filter_map(|line| line.split_whitespace().last());
    // `name@version` is the same name.
    let plain = names.map(|name| name.split('@').next().unwrap_or(name));
    Ok(plain.filter(|name| is_wanted(name)).map(str::to_owned).collect())
}

fn is_wanted(name: &str) -> bool {
    // The driver's own prefix is short: `cuMemMap` but not `custom_op`.
    let of_driver = name.strip_prefix("cu").is_some_and(|rest| rest.starts_with(|c: char| c.is_uppercase()));
    (of_driver || PREFIXES.iter().any(|prefix| name.starts_with(prefix))) && !LEFT.contains(&name)
}

/// The repository's list for the version that the package declares.
fn list_of(torch: &Path) -> Result<PathBuf> {
    let file = torch.join("version.py");
    let text = fs::read_to_string(&file).with_context(|| format!("failed to read `{}`", file.display()))?;
    let Some(version) = text.lines().find_map(|line| line.strip_prefix("__version__ = '")) else {
        bail!("`{}` declares no version; name the list with --output", file.display());
    };
    let minor: Vec<&str> = version.split(['.', '+', '\'']).take(2).collect();
    let symbols = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/emulator/symbols"));
    Ok(symbols.join(format!("torch-{}.txt", minor.join("."))))
}

#[cfg(test)]
mod tests {
    use super::is_wanted;

    #[test]
    fn names_of_the_cuda_libraries_are_wanted_and_others_are_not() {
        for name in
            ["cudaMalloc", "cuMemMap", "cublasLtMatmul", "__cudaRegisterVar", "ncclSend", "nvshmemx_init"]
        {
            assert!(is_wanted(name), "{name}");
        }
        for name in ["cudnnGetVersion", "_ZN2at4cuda", "custom", "cusp", "nvrtcVersion", "curl_easy_init"] {
            assert!(!is_wanted(name), "{name}");
        }
    }
}
