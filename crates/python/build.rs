//! Builds the emulated device's library, which the package carries, in a target folder of its own.

use std::path::PathBuf;
use std::process::Command;
use std::{env, fs, io};

fn main() -> io::Result<()> {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=../emulator");
    let variable =
        |name: &str| env::var_os(name).ok_or_else(|| io::Error::other(format!("{name} is not set")));
    if variable("CARGO_CFG_TARGET_OS")? == "macos" {
        // Its linker has to be told that Python's symbols come with the program.
        println!("cargo:rustc-cdylib-link-arg=-undefined");
        println!("cargo:rustc-cdylib-link-arg=dynamic_lookup");
    }
    let out = PathBuf::from(variable("OUT_DIR")?);
    let runs_there =
        variable("CARGO_CFG_TARGET_OS")? == "linux" && variable("CARGO_CFG_TARGET_ARCH")? == "x86_64";
    if !runs_there {
        return fs::write(out.join("emulator.rs"), "None");
    }
    let target = variable("TARGET")?;
    let mut cargo = Command::new(variable("CARGO")?);
    cargo.args([
        "build",
        "--release",
        "--package",
        "emulator",
        "--lib",
        "--manifest-path",
        "../../Cargo.toml",
    ]);
    cargo.arg("--target").arg(&target).arg("--target-dir").arg(out.join("emulator"));
    // Clippy's own wrapper would check the library in place of building it.
    cargo.env_remove("RUSTC_WORKSPACE_WRAPPER");
    cargo.env("CARGO_PROFILE_RELEASE_STRIP", "symbols");
    if !cargo.status()?.success() {
        return Err(io::Error::other("the emulated device's library does not build"));
    }
    let library = out.join("emulator").join(target).join("release/libvramledger_emulator.so");
    fs::write(out.join("emulator.rs"), format!("Some(include_bytes!({:?}))", library.display().to_string()))
}
