"""Write own.csv, which `dataset.path=own.csv` reads, from the list of a public release.

python list_release.py PTB-XL
"""

import sys

import pandas as pd


def ptb_xl() -> pd.DataFrame:
    table = pd.read_csv("ptbxl_database.csv")
    table["label"] = table.scp_codes.str.extract("(NORM|IMI)", expand=False)
    fold = table.strat_fold.map({9: "validation", 10: "test"}).fillna("train")
    path = table.filename_hr + ".hea"
    return pd.DataFrame(
        {"path": path, "label": table.label, "patient": table.patient_id, "split": fold}
    )


def ludb() -> pd.DataFrame:
    table = pd.read_csv("ludb.csv")
    label = table.Rhythms.str.extract("(Sinus|fibrillation)", expand=False)
    path = "data/" + table.ID.astype(str) + ".hea"
    return pd.DataFrame({"path": path, "label": label, "patient": table.ID})


def brats() -> pd.DataFrame:
    patient = pd.read_csv("name_mapping.csv").BraTS_2020_subject_ID
    stem = patient + "/" + patient
    return pd.DataFrame(
        {"path": stem + "_flair.nii", "mask": stem + "_seg.nii", "patient": patient}
    )


def chexpert() -> pd.DataFrame:
    table = pd.read_csv("CheXpert-v1.0-small/train.csv")
    label = table["Pleural Effusion"].map({0.0: "none", 1.0: "effusion"})
    patient = table.Path.str.extract("(patient[0-9]+)", expand=False)
    return pd.DataFrame({"path": table.Path, "label": label, "patient": patient})


def nih() -> pd.DataFrame:
    table = pd.read_csv("Data_Entry_2017.csv")
    label = table["Finding Labels"].str.extract("(No Finding|Effusion)", expand=False)
    path = "images/" + table["Image Index"]
    return pd.DataFrame({"path": path, "label": label, "patient": table["Patient ID"]})


def esc_50() -> pd.DataFrame:
    table = pd.read_csv("ESC-50-master/meta/esc50.csv")
    path = "ESC-50-master/audio/" + table.filename
    split = table.fold.map({5: "test"}).fillna("train")
    label = table.category.where(table.category.isin(["dog", "rain"]))
    return pd.DataFrame({"path": path, "label": label, "patient": table.src_file, "split": split})


RELEASES = {
    "PTB-XL": ptb_xl,
    "LUDB": ludb,
    "BraTS": brats,
    "CheXpert": chexpert,
    "NIH": nih,
    "ESC-50": esc_50,
}

if __name__ == "__main__":
    RELEASES[sys.argv[1]]().dropna().to_csv("own.csv", index=False)
